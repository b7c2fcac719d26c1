"""int4 groups for routed experts, everything else bf16: a weight-only config cannot describe
native fp8 beside it. Scope "all" packs shared experts and dense MLPs too."""

from __future__ import annotations

from mtp_checkpoints.families.base import Role
from mtp_checkpoints.formats.storage import Storage
from mtp_export.schemes.base import Scheme, every_linear

WEIGHT_ONLY_INT4 = Scheme(
    "weight_only_int4",
    "int4 + bf16",
    every_linear(Storage.BF16) | {Role.ROUTED_EXPERT: Storage.INT4_GROUP},
    {
        "all": every_linear(Storage.INT4_GROUP)
        | dict.fromkeys((Role.ATTENTION, Role.INDEXER), Storage.BF16)
    },
)
