"""Content of checkpoints on disk: model families, tensors, number formats and configs."""

__version__ = "0.1.0"
