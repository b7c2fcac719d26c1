"""Models, and how they are built from a checkpoint's tensors."""
