"""compressed-tensors' asymmetric integers: codes in 32-bit words along the input channels, and zero
points in words along the output channels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from mtp_checkpoints.dtypes import DType, OutputTensor
from mtp_checkpoints.formats.base import (
    COMPRESSED_SCALE,
    EncodedWeight,
    Place,
)
from mtp_checkpoints.formats.compressed import COMPRESSED, WeightsEntry, check_weight_shape
from mtp_checkpoints.formats.int_words import (
    WHOLE_ROW,
    ZeroPoints,
    divided,
    unpacked_columns,
    unpacked_rows,
)
from mtp_checkpoints.formats.rows import RowSource
from mtp_checkpoints.formats.verification import INT8_GATE, FormatGate

if TYPE_CHECKING:
    import torch

_LAYOUT, _ZERO_POINT, _SHAPE = "pack-quantized", "weight_zero_point", "weight_shape"
_SCALE_DTYPES = (DType.BF16, DType.F16, DType.F32)


@dataclass(frozen=True)
class Int4ZeroPoints(ZeroPoints):
    """weight_packed I32 [N, K/w], weight_scale [N, G], weight_shape I64 [2], weight_zero_point I32
    [N/w, G], with w numbers in a word; read as codes [N, K] with the zero points taken off.

    Source: compressed-tensors, `PackedQuantizationCompressor`.
    """

    storage: ClassVar[str] = "int4_zero_points"
    methods: ClassVar[tuple[str, ...]] = (COMPRESSED,)
    in_words: ClassVar[str] = "pack-quantized int4 with zero points"

    @classmethod
    def of_entry(cls, entry: WeightsEntry) -> Self | None:
        strategy = "channel" if entry.strategy == "channel" else "group"
        size = WHOLE_ROW if strategy == "channel" else entry.group_size
        if not isinstance(size, int) or not (size == WHOLE_ROW or size > size % cls.word_rows == 0):
            return None
        described = entry.has_numbers(
            _LAYOUT, kind="int", bits=cls.bits, strategy=strategy, symmetric=False
        )
        return cls(size) if described else None

    def tensors(self, name: str, shape: tuple[int, ...]) -> tuple[OutputTensor, ...]:
        (rows, columns), module = shape, name.removesuffix(".weight")
        groups = len(self._groups(range(columns), columns))
        zero_points = (len(divided(range(rows), self.word_rows)), groups)
        return (
            OutputTensor(f"{module}.weight_packed", DType.I32, (rows, columns // self.word_rows)),
            OutputTensor(f"{module}.{COMPRESSED_SCALE}", DType.BF16, (rows, groups)),
            OutputTensor(f"{module}.{_SHAPE}", DType.I64, (2,)),
            OutputTensor(f"{module}.{_ZERO_POINT}", DType.I32, zero_points),
        )

    def accepted_dtypes(self, tensor: OutputTensor) -> tuple[DType, ...]:
        return _SCALE_DTYPES if tensor.dtype == DType.BF16 else (tensor.dtype,)

    def check_constants(self, tensors: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> None:
        """Refuse a shape that contradicts the weight's; zero points may be any."""
        for name, stored in tensors.items():
            if name.endswith(f".{_SHAPE}"):
                check_weight_shape(name, stored, shape)

    def _groups(self, columns: range, total: int) -> range:
        return divided(columns, total if self.group_size == WHOLE_ROW else self.group_size)

    def places(self, rows: range, columns: range, shape: Sequence[int]) -> Sequence[Place]:
        groups = self._groups(columns, shape[1])
        return (
            (rows, divided(columns, self.word_rows)),
            (rows, groups),
            (range(2), None),
            (divided(rows, self.word_rows), groups),
        )

    def encoded(self, tensors: Sequence[torch.Tensor]) -> EncodedWeight:
        words, scale, _, zeros = tensors
        codes = unpacked_columns(words, self.bits)
        zero_points = unpacked_rows(zeros, self.bits)[: len(codes)]
        columns = codes.shape[1] // scale.shape[1]
        return EncodedWeight(self, codes - zero_points.repeat_interleave(columns, dim=1), scale)

    def encoded_rows(self, source: RowSource, start: int, stop: int) -> EncodedWeight:
        scale, shape, zeros = source.others
        words = divided(range(start, stop), self.word_rows)
        parts = (scale[start:stop], shape, zeros[words.start : words.stop])
        return self.encoded((source.whole_codes[start:stop], *parts))


@dataclass(frozen=True)
class Int8ZeroPoints(Int4ZeroPoints):
    """The same with four codes of 8 bits in a word."""

    storage: ClassVar[str] = "int8_zero_points"
    gate: ClassVar[FormatGate] = INT8_GATE
    bits: ClassVar[int] = 8
    word_rows: ClassVar[int] = 4
    in_words: ClassVar[str] = "pack-quantized int8 with zero points"
