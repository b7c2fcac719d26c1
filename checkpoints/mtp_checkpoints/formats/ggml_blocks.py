"""Blocks of ggml, llama.cpp's library, as GGUF files hold them: codes and scales side by side, told
by the element type of the tensor alone.

Sources: `ggml/src/ggml-common.h` and `ggml-quants.c` of llama.cpp, and the package `gguf`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from mtp_checkpoints.dtypes import DType, OutputTensor, tensor_bytes
from mtp_checkpoints.formats.base import (
    EncodedWeight,
    Place,
    ReadOnlyFormat,
    WeightFormat,
)
from mtp_checkpoints.formats.rows import RowSource
from mtp_checkpoints.formats.unquantized import Values
from mtp_checkpoints.formats.verification import (
    FIVE_BIT_GATE,
    FOUR_BIT_GATE,
    INT8_GATE,
    FormatGate,
)

if TYPE_CHECKING:
    import torch

    from mtp_checkpoints.containers.base import TensorInfo
    from mtp_kernels.quantize.row_codes import RowCodes

GGUF = "gguf"  # the quant_method of what a GGUF file holds
DECODED_BLOCKS, OPAQUE_BLOCKS = "decoded_blocks", "opaque_blocks"


class GgmlBlocks(WeightFormat):
    """One tensor of blocks of a weight [N, K], each of some elements of a row; in memory uint8
    [N, bytes of a row]."""

    dtype: ClassVar[DType]
    methods: ClassVar[tuple[str, ...]] = (GGUF,)
    word_rows: ClassVar[int] = 1
    compiled_sources: ClassVar[frozenset[str]] = frozenset({"bf16", "fp8_block"})
    has_row_codes: ClassVar[bool] = True
    code_bits: ClassVar[int] = 8  # of row_codes, whose groups have so many columns and numbers
    group_columns: ClassVar[int] = 32
    group_numbers: ClassVar[int] = 1

    @property
    def k_divisor(self) -> int:
        return self.dtype.unit_elements

    @property
    def k_unit(self) -> str:
        return "the elements of a block"

    def columns_of(self, codes: int) -> int:
        return codes // tensor_bytes(self.dtype, (self.k_divisor,)) * self.k_divisor

    def tensors(self, name: str, shape: tuple[int, ...]) -> tuple[OutputTensor, ...]:
        return (OutputTensor(name, self.dtype, shape),)

    def encoded(self, tensors: Sequence[torch.Tensor]) -> EncodedWeight:
        blocks = tensors[0]
        return EncodedWeight(self, blocks, blocks.new_empty(len(blocks), 0))

    def encoded_rows(self, source: RowSource, start: int, stop: int) -> EncodedWeight:
        return self.encoded((source.codes(start, stop),))

    def places(self, rows: range, columns: range, shape: Sequence[int]) -> Sequence[Place]:
        return ((rows, columns),)

    def encode(self, values: torch.Tensor, scale_rule: str) -> tuple[torch.Tensor, ...]:
        import torch

        from mtp_kernels.quantize.ggml_blocks import encoded_blocks

        blocks = encoded_blocks(self.storage, values.cpu().contiguous().numpy())
        return (torch.from_numpy(blocks),)

    def decode(self, codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        import torch

        from mtp_kernels.quantize.ggml_blocks import dequantize_ggml_blocks

        blocks: Any = codes.cpu().contiguous().flatten(0, -2).numpy()
        weights = torch.from_numpy(dequantize_ggml_blocks(self.storage, blocks))
        return weights.view(*codes.shape[:-1], -1).to(codes.device, dtype)

    def row_codes(self, codes: torch.Tensor, scale: torch.Tensor) -> RowCodes:
        from mtp_kernels.quantize.ggml_rows import ggml_row_codes

        return ggml_row_codes(self.storage, codes)

    def row_bytes(self, tensors: Sequence[TensorInfo], rows: int) -> int:
        elements = self.columns_of(tensors[0].size_bytes)
        return (
            elements * self.code_bits // 8 + 4 * self.group_numbers * elements // self.group_columns
        )


@dataclass(frozen=True)
class DecodedBlocks(Values, ReadOnlyFormat):
    """Values in float32 that were read of blocks: those of kv_b_proj, of which a file holds two
    parts."""

    dtype: ClassVar[DType] = DType.F32
    storage: ClassVar[str] = DECODED_BLOCKS
    gate: ClassVar[FormatGate] = FOUR_BIT_GATE  # of the coarsest of them
    methods: ClassVar[tuple[str, ...]] = (GGUF,)


@dataclass(frozen=True)
class OpaqueBlocks(Values, ReadOnlyFormat):
    """Blocks of ggml that nothing here decodes, or what would be computed of them: their bytes are
    linked, copied and hashed."""

    dtype: ClassVar[DType] = DType.F32
    storage: ClassVar[str] = OPAQUE_BLOCKS
    gate: ClassVar[FormatGate] = FOUR_BIT_GATE  # of a model in them, beside which others are judged
    methods: ClassVar[tuple[str, ...]] = (GGUF,)
    is_decoded: ClassVar[bool] = False

    def accepted_dtypes(self, tensor: OutputTensor) -> tuple[DType, ...]:
        return (tensor.dtype, *(dtype for dtype in DType if dtype.is_opaque))


@dataclass(frozen=True)
class Q8(GgmlBlocks):
    """Q8_0: a scale in half precision, and 32 codes of int8."""

    dtype: ClassVar[DType] = DType.GGML_Q8_0
    storage: ClassVar[str] = "q8_0"
    operation: ClassVar[str] = "quantize_q8_0"
    gate: ClassVar[FormatGate] = INT8_GATE


@dataclass(frozen=True)
class Q4(GgmlBlocks):
    """Q4_0: a scale, and 32 codes of four bits, less 8."""

    code_bits: ClassVar[int] = 4
    dtype: ClassVar[DType] = DType.GGML_Q4_0
    storage: ClassVar[str] = "q4_0"
    operation: ClassVar[str] = "quantize_q4_0"
    gate: ClassVar[FormatGate] = FOUR_BIT_GATE


@dataclass(frozen=True)
class Q4WithMinimum(GgmlBlocks):
    """Q4_1: a scale, a minimum, and 32 codes of four bits."""

    code_bits: ClassVar[int] = 4
    group_numbers: ClassVar[int] = 2
    dtype: ClassVar[DType] = DType.GGML_Q4_1
    storage: ClassVar[str] = "q4_1"
    operation: ClassVar[str] = "quantize_q4_1"
    gate: ClassVar[FormatGate] = FOUR_BIT_GATE


@dataclass(frozen=True)
class Q5(GgmlBlocks):
    """Q5_0: a scale, the fifth bits of 32 codes, and the others, less 16."""

    dtype: ClassVar[DType] = DType.GGML_Q5_0
    storage: ClassVar[str] = "q5_0"
    operation: ClassVar[str] = "quantize_q5_0"
    gate: ClassVar[FormatGate] = FIVE_BIT_GATE


@dataclass(frozen=True)
class Q5WithMinimum(GgmlBlocks):
    """Q5_1: a scale, a minimum, the fifth bits of 32 codes, and the others."""

    group_numbers: ClassVar[int] = 2
    dtype: ClassVar[DType] = DType.GGML_Q5_1
    storage: ClassVar[str] = "q5_1"
    operation: ClassVar[str] = "quantize_q5_1"
    gate: ClassVar[FormatGate] = FIVE_BIT_GATE


@dataclass(frozen=True)
class Mxfp4(GgmlBlocks):
    """MXFP4: a scale of e8m0, and 32 codes of e2m1."""

    code_bits: ClassVar[int] = 4
    dtype: ClassVar[DType] = DType.GGML_MXFP4
    storage: ClassVar[str] = "mxfp4"
    operation: ClassVar[str] = "quantize_mxfp4"
    gate: ClassVar[FormatGate] = FOUR_BIT_GATE


class _SuperBlocks(GgmlBlocks):
    """Blocks of 256 elements, with scales of six or eight bits of 16 or 32 of them.

    fallback takes their place for rows that they do not divide, as in llama-quantize.
    """

    fallback: ClassVar[type[GgmlBlocks]]

    def for_columns(self, columns: int) -> WeightFormat:
        return self.fallback() if columns % self.k_divisor else self


@dataclass(frozen=True)
class Q4K(_SuperBlocks):
    """Q4_K: codes of four bits above a minimum, in groups of 32."""

    code_bits: ClassVar[int] = 4
    group_numbers: ClassVar[int] = 2
    dtype: ClassVar[DType] = DType.GGML_Q4_K
    storage: ClassVar[str] = "q4_k"
    operation: ClassVar[str] = "quantize_q4_k"
    fallback: ClassVar[type[GgmlBlocks]] = Q5
    gate: ClassVar[FormatGate] = FOUR_BIT_GATE


@dataclass(frozen=True)
class Q5K(_SuperBlocks):
    """Q5_K: codes of five bits above a minimum, in groups of 32."""

    group_numbers: ClassVar[int] = 2
    dtype: ClassVar[DType] = DType.GGML_Q5_K
    storage: ClassVar[str] = "q5_k"
    operation: ClassVar[str] = "quantize_q5_k"
    fallback: ClassVar[type[GgmlBlocks]] = Q5WithMinimum
    gate: ClassVar[FormatGate] = FIVE_BIT_GATE


@dataclass(frozen=True)
class Q6K(_SuperBlocks):
    """Q6_K: codes of six bits, less 32, in groups of 16."""

    group_columns: ClassVar[int] = 16
    dtype: ClassVar[DType] = DType.GGML_Q6_K
    storage: ClassVar[str] = "q6_k"
    operation: ClassVar[str] = "quantize_q6_k"
    fallback: ClassVar[type[GgmlBlocks]] = Q8
    gate: ClassVar[FormatGate] = FIVE_BIT_GATE
