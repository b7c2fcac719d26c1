"""Models: their layers by torch and by compiled kernels, built by the description of a family."""
