"""int4 groups for routed experts, native fp8 for every other linear, activations in fp8."""

from __future__ import annotations

from mtp_checkpoints.families.base import Role
from mtp_checkpoints.formats.storage import Storage
from mtp_export.schemes.base import Scheme, every_linear

A8W8_FP8_WINT4 = Scheme(
    "a8w8_fp8_wint4",
    "int4 + fp8",
    every_linear(Storage.FP8_BLOCK) | {Role.ROUTED_EXPERT: Storage.INT4_GROUP},
    {"w4afp8": every_linear(Storage.FP8_BLOCK) | {Role.ROUTED_EXPERT: Storage.W4AFP8}},
    int4_activations_fp8=True,
)
