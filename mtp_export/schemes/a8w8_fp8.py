"""Native fp8: e4m3 codes, a scale per 128×128 block, activations quantized at run time."""

from __future__ import annotations

from mtp_checkpoints.formats.storage import Storage
from mtp_export.schemes.base import Scheme, every_linear

A8W8_FP8 = Scheme("a8w8_fp8", "fp8", every_linear(Storage.FP8_BLOCK))
