"""fp8 blocks: e4m3 codes with a scale per 128x128 block. Source: DeepSeek-V3, section 3.3."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from mtp_checkpoints.dtypes import SCALE_DTYPES, WIDE_SCALE_DTYPES, DType, OutputTensor
from mtp_checkpoints.formats.base import (
    BLOCK,
    COMPRESSED_SCALE,
    NATIVE_SCALE,
    EncodedWeight,
    FormatOptions,
    KernelFormat,
)
from mtp_checkpoints.formats.compressed import COMPRESSED, WeightsEntry, group, numbers
from mtp_checkpoints.formats.rows import RowSource, row_ranges
from mtp_checkpoints.formats.unquantized import UNQUANTIZED
from mtp_checkpoints.formats.verification import FP8_GATE, FormatGate

if TYPE_CHECKING:
    import torch

    from mtp_kernels import quantize

_BLOCKS = (BLOCK, BLOCK)
_CODE_DTYPES = (DType.F8_E4M3,)


@dataclass(frozen=True)
class Fp8Block(KernelFormat):
    """Codes F8_E4M3 [N, K], scale [⌈N/128⌉, ⌈K/128⌉], ragged edges included.

    scale_name is the last component of the scale's name; scale_dtypes are those that may be read.
    chunk_rows: rows after which blocks begin anew, of a weight whose ranks were stored one after
    the other; 0: they do not.
    """

    scale_name: str = NATIVE_SCALE
    scale_dtypes: tuple[DType, ...] = WIDE_SCALE_DTYPES
    chunk_rows: int = 0

    storage: ClassVar[str] = "fp8_block"
    operation: ClassVar[str] = "quantize_fp8_block"
    gate: ClassVar[FormatGate] = FP8_GATE
    methods: ClassVar[tuple[str, ...]] = ("fp8", COMPRESSED, "w4afp8")
    compiled_sources: ClassVar[frozenset[str]] = frozenset({"bf16"})
    scale_rows: ClassVar[int] = BLOCK
    in_words: ClassVar[str] = f"float-quantized blocks of {BLOCK}x{BLOCK}"

    @classmethod
    def of_options(cls, options: FormatOptions) -> Fp8Block:
        return cls(options.fp8_scale_name)

    @classmethod
    def of_entry(cls, entry: WeightsEntry) -> Fp8Block | None:
        fits = entry.has_numbers("float-quantized", kind="float", bits=8, strategy="block")
        return cls(COMPRESSED_SCALE, SCALE_DTYPES) if fits and entry.block == _BLOCKS else None

    def group(self, *, activations_fp8: bool) -> dict[str, Any]:
        weights = numbers(8, "float", "block") | {"block_structure": list(_BLOCKS)}
        activations = numbers(8, "float", "group", dynamic=True) | {"group_size": BLOCK}
        return group("float-quantized", weights, activations)

    def tensors(self, name: str, shape: tuple[int, ...]) -> tuple[OutputTensor, ...]:
        blocks = (self.scale_span(shape[0] - 1, shape[0])[1], -(-shape[1] // BLOCK))
        module = name.removesuffix(".weight")
        return (
            OutputTensor(name, DType.F8_E4M3, shape),
            OutputTensor(f"{module}.{self.scale_name}", DType.F32, blocks),
        )

    def in_chunks(self, rows: int, chunks: int) -> Fp8Block:
        size = rows // chunks
        return replace(self, chunk_rows=size) if size % BLOCK and size < rows else self

    def scale_span(self, start: int, stop: int) -> tuple[int, int]:
        if not self.chunk_rows:
            return super().scale_span(start, stop)
        number, first = divmod(start, self.chunk_rows)
        before = number * -(-self.chunk_rows // BLOCK)
        last = first + stop - start
        return before + first // BLOCK, before - (-last // BLOCK)

    def encoded_rows(self, source: RowSource, start: int, stop: int) -> EncodedWeight:
        import torch

        parts = [
            super(Fp8Block, self).encoded_rows(source, max(start, first), min(stop, last))
            for first, last in row_ranges(stop, stop, self.chunk_rows)
            if last > start
        ]
        if len(parts) == 1:
            return parts[0]
        return EncodedWeight(UNQUANTIZED, torch.cat([part.dequantize() for part in parts]))

    def accepted_dtypes(self, tensor: OutputTensor) -> tuple[DType, ...]:
        return _CODE_DTYPES if tensor.dtype in _CODE_DTYPES else self.scale_dtypes

    def source(self, codes: torch.Tensor, scale: torch.Tensor) -> quantize.Fp8Block:
        from mtp_kernels import quantize

        return quantize.Fp8Block(codes, scale)
