"""Level files: manifest, checksums, and configs against the tensors."""
