"""int8 per channel for MLPs and experts; attention in bf16, as SGLang reads kv_b_proj's weight."""

from __future__ import annotations

from mtp_checkpoints.families.base import Role
from mtp_checkpoints.formats.storage import Storage
from mtp_export.schemes.base import Scheme, every_linear

WEIGHT_ONLY_INT8 = Scheme(
    "weight_only_int8",
    "int8 + bf16",
    every_linear(Storage.INT8_CHANNEL)
    | dict.fromkeys((Role.ATTENTION, Role.INDEXER), Storage.BF16),
)
