"""Transforms of steps that write GGUF files: what llama.cpp keeps in another form than every other
engine."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from mtp_checkpoints.dtypes import DType, OutputTensor
from mtp_checkpoints.formats import UNQUANTIZED, Fp8Block, WeightFormat
from mtp_checkpoints.tensors.tensor_stream import TensorStream
from mtp_export.plan import Facts, Resources, Sink
from mtp_export.schemes.transforms import (
    RowPiece,
    array_of,
    bytes_of,
    converting,
    quality,
    row_pieces,
)
from mtp_kernels.sizes import LatentSizes

if TYPE_CHECKING:
    from mtp_kernels.quantize import ErrorStats
    from mtp_kernels.quantize.array_conversions import Rows

_PIECE_ELEMENTS = 1 << 20
_COMPILED_SOURCES = (UNQUANTIZED.storage, Fp8Block.storage)
# Bytes of an array, and the error of its conversion; None where nothing was converted.
Half = tuple[Any, "ErrorStats | None"]


@dataclass(frozen=True)
class Widen:
    """Elements of bf16 or fp16 as float32, which holds them exactly."""

    name: ClassVar[str] = "widen_f32"
    uses_torch: ClassVar[bool] = False

    def run(
        self,
        inputs: Sequence[TensorStream],
        outputs: Sequence[OutputTensor],
        sink: Sink,
        resources: Resources,
    ) -> Facts:
        """Pass on the elements, block by block."""
        import numpy as np

        (stream,) = inputs
        for block in stream.blocks():
            if stream.info.dtype == DType.BF16:
                wide = np.frombuffer(block, "<u2").astype("<u4") << 16
            else:
                wide = np.frombuffer(block, "<f2").astype("<f4")
            sink(0, bytes_of(wide))
        return {}


@dataclass(frozen=True)
class SplitLatentUp:
    """Projection of the latents, by head to [nope key | value], as two tensors: the keys' [h, c, n]
    is transposed in every head, the values' is [h, v, c].

    formats are those of keys and values. Where neither they nor the source's quantize, the elements
    are unchanged. scale_rule as of a conversion.
    """

    sizes: LatentSizes
    formats: tuple[WeightFormat, WeightFormat] = (UNQUANTIZED, UNQUANTIZED)
    source: WeightFormat = UNQUANTIZED
    scale_rule: str = "minmax"

    name: ClassVar[str] = "split_latent_up"

    @property
    def uses_torch(self) -> bool:
        in_blocks = all("bf16" in one.compiled_sources for one in self.formats)
        plain = all(one == UNQUANTIZED for one in self.formats)
        return self.source.storage not in _COMPILED_SOURCES or not (in_blocks or plain)

    @property
    def format(self) -> WeightFormat:
        """Format of the first output."""
        return self.formats[0]

    @property
    def converts(self) -> bool:
        """True where elements change."""
        return any(one != UNQUANTIZED for one in (*self.formats, self.source))

    def run(
        self,
        inputs: Sequence[TensorStream],
        outputs: Sequence[OutputTensor],
        sink: Sink,
        resources: Resources,
    ) -> Facts:
        """Pass on both halves, some heads at a time (InvalidInputError for damaged values)."""
        errors: list[ErrorStats] = []
        compiles = resources.device == "cpu" and not self.uses_torch
        for start, stop in self._pieces():
            with converting(inputs[0].info, (start, stop)):
                rows = row_pieces(inputs, self.source, start, stop)
                halves = (self._by_arrays(rows) if compiles else None) or self._by_tensors(rows)
            for number, (half, error) in enumerate(halves):
                sink(number, bytes_of(half))
                errors += [] if error is None else [error]
        return quality(errors) if errors else {}

    @property
    def _head_rows(self) -> int:
        return self.sizes.nope + self.sizes.value

    def _pieces(self) -> Iterator[tuple[int, int]]:
        """Yield the first and the last row of some heads, at rows of scales too."""
        rows = self.sizes.heads * self._head_rows
        unit = math.lcm(self._head_rows, self.source.scale_rows)
        step = max(1, _PIECE_ELEMENTS // (unit * self.sizes.latent)) * unit
        for start in range(0, rows, step):
            yield start, min(start + step, rows)

    def _by_arrays(self, rows: Sequence[RowPiece]) -> Sequence[Half] | None:
        """Return both halves by compiled code; None for rows that it does not know."""
        from mtp_kernels.quantize.array_conversions import rows_of

        error: ErrorStats | None = None
        if len(rows) == 1:
            values = rows[0].array()
        elif rows[1].info.dtype != DType.F32:
            return None
        else:
            fp8 = rows_of(*(piece.array() for piece in rows))
            if self.format == UNQUANTIZED:
                dense = self.format.quantize_rows(fp8, self.scale_rule)
                if dense is None:
                    return None
                (values,), error = dense
            else:
                values = _float32(fp8)
        halves: list[Half] = []
        for half, own in zip(self._halves(values), self.formats, strict=True):
            if own == UNQUANTIZED:
                halves.append((half, None))
                continue
            converted = own.quantize_rows(rows_of(half), self.scale_rule)
            if converted is None:
                return None
            halves.append((converted[0][0], converted[1]))
        return halves if error is None else [(halves[0][0], error), halves[1]]

    def _by_tensors(self, rows: Sequence[RowPiece]) -> Sequence[Half]:
        """Return both halves by torch (ValueError for damaged values)."""
        from mtp_kernels import quantize

        values, *scale = (piece.tensor() for piece in rows)
        if scale:
            values = quantize.checked_values(self.source.source(values, *scale))
        elif self.converts:
            values = quantize.checked_values(values)
        heads = values.view(-1, self._head_rows, self.sizes.latent)
        keys, rest = heads[:, : self.sizes.nope], heads[:, self.sizes.nope :]
        halves: list[Half] = []
        for half, own in zip((keys.transpose(1, 2), rest), self.formats, strict=True):
            matrix = half.reshape(-1, half.shape[-1]).contiguous()
            if not self.converts:
                halves.append((array_of(matrix), None))
                continue
            tensors, error = own.quantize(matrix, self.scale_rule)
            halves.append((array_of(tensors[0]), error))
        return halves

    def _halves(self, values: Any) -> tuple[Any, Any]:
        """Return the matrices of keys, transposed by head, and of values, of an array of rows."""
        heads = values.reshape(-1, self._head_rows, self.sizes.latent)
        keys = heads[:, : self.sizes.nope].transpose(0, 2, 1)
        rest = heads[:, self.sizes.nope :]
        return keys.reshape(-1, self.sizes.nope), rest.reshape(-1, self.sizes.latent)


def _float32(fp8: Rows) -> Any:
    """Return the values of fp8 blocks."""
    import numpy as np

    from mtp_kernels.quantize.array_conversions import dequantize_fp8_block

    return dequantize_fp8_block(*fp8, np.float32)[0]
