"""Everything in bf16: for hardware without fp8, and the way into engines that quantize at load."""

from __future__ import annotations

from mtp_checkpoints.formats.storage import Storage
from mtp_export.schemes.base import Scheme, every_linear

BF16 = Scheme("bf16", "bf16", every_linear(Storage.BF16))
