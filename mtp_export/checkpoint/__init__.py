"""Checkpoints on disk: strict reading, planning, streaming writes, manifests and links."""
