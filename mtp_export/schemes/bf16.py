"""Everything in bf16: for hardware without fp8, and the way into engines that quantize at load."""

from __future__ import annotations

from mtp_export.schemes.base import Scheme, every_linear
from mtp_export.schemes.storage import Storage

BF16 = Scheme("bf16", "bf16", every_linear(Storage.BF16))
