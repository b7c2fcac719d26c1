"""Weight formats by storage. A new one is one file, one line here, and its name in Storage; those
of others' checkpoints, which nothing writes, are made by the readings of their configs."""

from __future__ import annotations

from collections.abc import Callable

from mtp_checkpoints.formats.awq import AwqInt4
from mtp_checkpoints.formats.base import EncodedWeight, FormatOptions, WeightFormat
from mtp_checkpoints.formats.fp8_block import Fp8Block
from mtp_checkpoints.formats.fp8_channel import Fp8Channel
from mtp_checkpoints.formats.gptq import GptqInt4
from mtp_checkpoints.formats.int4_words import CODES_PER_WORD, WHOLE_ROW
from mtp_checkpoints.formats.modelopt import Fp8Tensor, NvFp4
from mtp_checkpoints.formats.pack_quantized import Int4Group, Int8Channel
from mtp_checkpoints.formats.storage import Storage
from mtp_checkpoints.formats.unquantized import UNQUANTIZED, unquantized
from mtp_checkpoints.formats.w4afp8 import W4AFp8

__all__ = [
    "CODES_PER_WORD",
    "COMPRESSED_FORMATS",
    "FORMATS",
    "UNQUANTIZED",
    "WHOLE_ROW",
    "AwqInt4",
    "EncodedWeight",
    "FormatOptions",
    "Fp8Block",
    "Fp8Channel",
    "Fp8Tensor",
    "GptqInt4",
    "Int4Group",
    "Int8Channel",
    "NvFp4",
    "W4AFp8",
    "WeightFormat",
    "unquantized",
]

FORMATS: dict[Storage, Callable[[FormatOptions], WeightFormat]] = {
    Storage.BF16: lambda options: UNQUANTIZED,
    Storage.FP8_BLOCK: lambda options: Fp8Block(options.fp8_scale_name),
    Storage.FP8_CHANNEL: lambda options: Fp8Channel(),
    Storage.INT8_CHANNEL: lambda options: Int8Channel(),
    Storage.INT4_GROUP: lambda options: Int4Group(options.group_size),
    Storage.W4AFP8: lambda options: W4AFp8(),
}

# Formats that a group of a compressed-tensors config may describe.
COMPRESSED_FORMATS: tuple[type[WeightFormat], ...] = (
    Int4Group,
    Int8Channel,
    Fp8Channel,
    Fp8Block,
)
