"""Storages of linear weights by name, and the constants of their layouts on disk.

Layouts: compressed-tensors `pack-quantized` and `float-quantized`, DeepSeek-V3 fp8 blocks, SGLang
`quantization/w4afp8.py`. mtp_checkpoints.formats has the code for each.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum

from mtp_checkpoints.dtypes import DType

BLOCK = 128  # rows and columns per fp8 scale
GROUP_SIZES = (32, 64, 128)  # columns per int4 scale
W4AFP8_GROUP = 128
# Last name components of an fp8 scale. The released name says inverse, but the scale multiplies.
NATIVE_SCALE = "weight_scale_inv"
COMPRESSED_SCALE = "weight_scale"
SCALE_DTYPES = (DType.F32, DType.F8_E8M0)  # of fp8: engines widen a power of two as they load it


class Storage(StrEnum):
    """Storage of a linear weight on disk; BF16 includes whatever dtype the model computes in."""

    BF16 = "bf16"
    FP8_BLOCK = "fp8_block"
    FP8_CHANNEL = "fp8_channel"
    INT8_CHANNEL = "int8_channel"
    INT4_GROUP = "int4_group"
    W4AFP8 = "w4afp8"
    AWQ_INT4 = "awq_int4"
    GPTQ_INT4 = "gptq_int4"
    NVFP4 = "nvfp4"
    FP8_TENSOR = "fp8_tensor"


# Storages of checkpoints that others quantized: read, and never written.
READ_ONLY = frozenset({Storage.AWQ_INT4, Storage.GPTQ_INT4, Storage.NVFP4, Storage.FP8_TENSOR})
FLOATS = frozenset({Storage.BF16, Storage.FP8_BLOCK})
# compressed-tensors' integers; those of w4afp8 are SGLang's own.
INTEGERS = (Storage.INT4_GROUP, Storage.INT8_CHANNEL)


def mixes_integers_with_fp8(storages: Collection[Storage]) -> bool:
    """Return True for integers beside fp8, which each Dialect describes in its own way."""
    return Storage.FP8_BLOCK in storages and any(storage in INTEGERS for storage in storages)
