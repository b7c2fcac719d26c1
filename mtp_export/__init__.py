"""Export, quantize and verify DeepSeek-V3-class checkpoints with their MTP module."""

from mtp_checkpoints import __version__

__all__ = ["__version__"]
