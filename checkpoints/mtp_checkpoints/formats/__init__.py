"""Weight formats by name. A new one is one file and one line here; those of others' checkpoints,
which nothing writes, are made by the quantization methods that read their configs."""

from __future__ import annotations

from collections.abc import Collection

from mtp_checkpoints.formats.auto_round import AutoRoundInt4, AutoRoundInt8
from mtp_checkpoints.formats.awq import AwqInt4
from mtp_checkpoints.formats.base import DamagedWeight, EncodedWeight, FormatOptions, WeightFormat
from mtp_checkpoints.formats.bitsandbytes import BitsAndBytes4, BitsAndBytesInt8
from mtp_checkpoints.formats.compressed import COMPRESSED
from mtp_checkpoints.formats.float16 import Float16
from mtp_checkpoints.formats.fp8_block import Fp8Block
from mtp_checkpoints.formats.fp8_channel import Fp8Channel
from mtp_checkpoints.formats.ggml_blocks import (
    GGUF,
    Q4,
    Q4K,
    Q5,
    Q5K,
    Q6K,
    Q8,
    DecodedBlocks,
    Mxfp4,
    OpaqueBlocks,
    Q4WithMinimum,
    Q5WithMinimum,
)
from mtp_checkpoints.formats.gptq import GptqInt4, GptqInt8, GptqWords
from mtp_checkpoints.formats.int_quantized import Int8Unpacked
from mtp_checkpoints.formats.int_words import CODES_PER_WORD, WHOLE_ROW, InputWords
from mtp_checkpoints.formats.mlx_affine import MlxAffine
from mtp_checkpoints.formats.modelopt import Fp8Tensor, NvFp4, NvFp4A16
from mtp_checkpoints.formats.mx import MxFp4Packed, MxFp8
from mtp_checkpoints.formats.nvfp4 import NvFp4Packed, NvFp4PackedA4
from mtp_checkpoints.formats.pack_quantized import Int4Group, Int8Channel
from mtp_checkpoints.formats.quark import QuarkFp8, QuarkInt4, QuarkInt8, QuarkMxFp4
from mtp_checkpoints.formats.unquantized import UNQUANTIZED, Unquantized, unquantized
from mtp_checkpoints.formats.w4afp8 import W4AFp8
from mtp_checkpoints.formats.zero_points import Int4ZeroPoints, Int8ZeroPoints

__all__ = [
    "CODES_PER_WORD",
    "FORMATS",
    "GGUF",
    "UNQUANTIZED",
    "WHOLE_ROW",
    "AutoRoundInt4",
    "AutoRoundInt8",
    "AwqInt4",
    "BitsAndBytes4",
    "BitsAndBytesInt8",
    "DamagedWeight",
    "EncodedWeight",
    "Float16",
    "FormatOptions",
    "Fp8Block",
    "Fp8Channel",
    "Fp8Tensor",
    "GptqInt4",
    "GptqInt8",
    "GptqWords",
    "InputWords",
    "Int4Group",
    "Int4ZeroPoints",
    "Int8Channel",
    "Int8Unpacked",
    "Int8ZeroPoints",
    "MlxAffine",
    "MxFp4Packed",
    "MxFp8",
    "NvFp4",
    "NvFp4A16",
    "NvFp4Packed",
    "NvFp4PackedA4",
    "QuarkFp8",
    "QuarkInt4",
    "QuarkInt8",
    "QuarkMxFp4",
    "W4AFp8",
    "Unquantized",
    "WeightFormat",
    "formats_described_by",
    "has_groups",
    "mixes_groups_with_fp8",
    "storages_of",
    "unquantized",
]

FORMATS: dict[str, type[WeightFormat]] = {
    "bf16": Unquantized,
    "int4_group": Int4Group,
    "int8_channel": Int8Channel,
    "fp8_channel": Fp8Channel,
    "fp8_block": Fp8Block,
    "mxfp4_packed": MxFp4Packed,
    "mxfp8": MxFp8,
    "nvfp4_packed": NvFp4Packed,
    "nvfp4_packed_a4": NvFp4PackedA4,
    "w4afp8": W4AFp8,
    "awq_int4": AwqInt4,
    "gptq_int4": GptqInt4,
    "gptq_int8": GptqInt8,
    "auto_round_int4": AutoRoundInt4,
    "auto_round_int8": AutoRoundInt8,
    "mlx_affine": MlxAffine,
    "bitsandbytes_int8": BitsAndBytesInt8,
    "bitsandbytes_4bit": BitsAndBytes4,
    "quark_int4": QuarkInt4,
    "quark_int8": QuarkInt8,
    "quark_fp8": QuarkFp8,
    "quark_mxfp4": QuarkMxFp4,
    "int8_unpacked": Int8Unpacked,
    "int4_zero_points": Int4ZeroPoints,
    "int8_zero_points": Int8ZeroPoints,
    "nvfp4": NvFp4,
    "nvfp4_a16": NvFp4A16,
    "fp8_tensor": Fp8Tensor,
    "f16": Float16,
    "q8_0": Q8,
    "q4_0": Q4,
    "q4_1": Q4WithMinimum,
    "q5_0": Q5,
    "q5_1": Q5WithMinimum,
    "mxfp4": Mxfp4,
    "q4_k": Q4K,
    "q5_k": Q5K,
    "q6_k": Q6K,
    "decoded_blocks": DecodedBlocks,
    "opaque_blocks": OpaqueBlocks,
}


def formats_described_by(method: str) -> tuple[type[WeightFormat], ...]:
    """Return the formats that configs of a quant_method describe."""
    return tuple(known for known in FORMATS.values() if method in known.methods)


def storages_of(methods: Collection[str]) -> frozenset[str]:
    """Return the formats, by name, that loaders of these quant_methods read: unquantized weights,
    and those of which one of them is the own method."""
    return frozenset(
        name for name, known in FORMATS.items() if not known.methods or known.methods[0] in methods
    )


def has_groups(storages: Collection[str]) -> bool:
    """Return True for a format that is described by a group of compressed-tensors alone."""
    return any(FORMATS[storage].methods[:1] == (COMPRESSED,) for storage in storages)


def mixes_groups_with_fp8(storages: Collection[str]) -> bool:
    """Return True for such formats beside fp8, which each Dialect describes in its own way."""
    return Fp8Block.storage in storages and has_groups(storages)
