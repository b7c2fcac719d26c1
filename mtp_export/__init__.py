"""Export, quantize and verify DeepSeek-V3-class checkpoints with their MTP module."""

__version__ = "0.1.0"
