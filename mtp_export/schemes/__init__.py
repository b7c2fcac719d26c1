"""Precision schemes by name. A new scheme is one file and one line here."""

from __future__ import annotations

from mtp_export.schemes.a8w8_fp8 import A8W8_FP8
from mtp_export.schemes.a8w8_fp8_wint4 import A8W8_FP8_WINT4
from mtp_export.schemes.base import Scheme
from mtp_export.schemes.bf16 import BF16
from mtp_export.schemes.weight_only_int4 import WEIGHT_ONLY_INT4
from mtp_export.schemes.weight_only_int8 import WEIGHT_ONLY_INT8

SCHEMES: dict[str, Scheme] = {
    "a8w8_fp8_wint4": A8W8_FP8_WINT4,
    "weight_only_int4": WEIGHT_ONLY_INT4,
    "a8w8_fp8": A8W8_FP8,
    "weight_only_int8": WEIGHT_ONLY_INT8,
    "bf16": BF16,
}
