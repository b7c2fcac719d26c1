"""Quark's layouts: int4 in groups, int8 and fp8 with one scale or one per output channel, and
mxfp4.

Source: AMD Quark, `torch/export/nn/modules/realquantizer.py` and `torch/utils/pack.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from mtp_checkpoints.dtypes import DType, OutputTensor
from mtp_checkpoints.formats.awq import AwqInt4
from mtp_checkpoints.formats.base import (
    COMPRESSED_SCALE,
    EncodedWeight,
    Place,
    ReadOnlyFormat,
)
from mtp_checkpoints.formats.int_quantized import Int8Unpacked
from mtp_checkpoints.formats.int_words import CODES_PER_WORD
from mtp_checkpoints.formats.modelopt import Fp8Tensor
from mtp_checkpoints.formats.mx import MX_GROUP, MxFp4Packed
from mtp_checkpoints.formats.rows import RowSource

if TYPE_CHECKING:
    import torch

    from mtp_kernels.quantize.row_codes import RowCodes

_METHODS = ("quark",)
_ZERO_POINT = "weight_zero_point"
_SIGN = 8  # of a code of 4 bits
_NUMBER_DTYPES = (DType.BF16, DType.F16, DType.F32)


@dataclass(frozen=True)
class QuarkInt4(AwqInt4):
    """weight I32 [K, N/8], weight_scale [K/group, N], weight_zero_point I32 [K/group, N/8]: words
    in AWQ's order. signed: codes and zero points are two's complements."""

    signed: bool

    storage: ClassVar[str] = "quark_int4"
    methods: ClassVar[tuple[str, ...]] = _METHODS

    def tensors(self, name: str, shape: tuple[int, ...]) -> tuple[OutputTensor, ...]:
        (rows, columns), module = shape, name.removesuffix(".weight")
        words, groups = rows // CODES_PER_WORD, columns // self.group_size
        return (
            OutputTensor(name, DType.I32, (columns, words)),
            OutputTensor(f"{module}.{COMPRESSED_SCALE}", DType.F16, (groups, rows)),
            OutputTensor(f"{module}.{_ZERO_POINT}", DType.I32, (groups, words)),
        )

    def _codes(self, words: torch.Tensor) -> torch.Tensor:
        return self._numbers(super()._codes(words))

    def zero_points(self, words: torch.Tensor) -> torch.Tensor:
        return self._numbers(super().zero_points(words))

    def _numbers(self, codes: torch.Tensor) -> torch.Tensor:
        return (codes ^ _SIGN) - _SIGN if self.signed else codes


class _OfRows(ReadOnlyFormat):
    """Scales and their like of a matrix: one number, or per_channel a vector [N]."""

    per_channel: bool

    def _number_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape[:1] if self.per_channel else ()

    def _number_rows(self, rows: range) -> range:
        return rows if self.per_channel else range(1)

    def encoded_rows(self, source: RowSource, start: int, stop: int) -> EncodedWeight:
        numbers = (one[start:stop] if one.dim() else one for one in source.others)
        return self.encoded((source.codes(start, stop), *numbers))


@dataclass(frozen=True)
class QuarkInt8(_OfRows, Int8Unpacked):
    """weight I8 [N, K], weight_scale and weight_zero_point I8 [N] or []; has_input_scale:
    input_scale and input_zero_point I8 []. Read as codes with the zero points taken off, I16."""

    per_channel: bool
    has_input_scale: bool

    storage: ClassVar[str] = "quark_int8"
    methods: ClassVar[tuple[str, ...]] = _METHODS
    word_rows: ClassVar[int] = 1

    def tensors(self, name: str, shape: tuple[int, ...]) -> tuple[OutputTensor, ...]:
        numbers, module = self._number_shape(shape), name.removesuffix(".weight")
        of_inputs = (
            OutputTensor(f"{module}.input_scale", DType.BF16, ()),
            OutputTensor(f"{module}.input_zero_point", DType.I8, ()),
        )
        return (
            OutputTensor(name, DType.I8, shape),
            OutputTensor(f"{module}.{COMPRESSED_SCALE}", DType.BF16, numbers),
            OutputTensor(f"{module}.{_ZERO_POINT}", DType.I8, numbers),
            *(of_inputs if self.has_input_scale else ()),
        )

    def places(self, rows: range, columns: range, shape: Sequence[int]) -> Sequence[Place]:
        numbers, of_inputs = (self._number_rows(rows), None), (range(1), None)
        return ((rows, columns), numbers, numbers, *(of_inputs,) * 2 * self.has_input_scale)

    def check_constants(self, tensors: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> None:
        """Accept zero points whatever they are: every code is one."""

    def encoded(self, tensors: Sequence[torch.Tensor]) -> EncodedWeight:
        codes, scale, zeros = tensors[:3]
        numbers = codes.short() - zeros.short().reshape(-1, 1)
        return EncodedWeight(self, numbers, scale.reshape(-1, 1).expand(len(codes), 1))

    def row_codes(self, codes: torch.Tensor, scale: torch.Tensor) -> RowCodes:
        from mtp_kernels.quantize.row_codes import integer_rows

        return integer_rows(codes, scale, 8)


@dataclass(frozen=True)
class QuarkFp8(_OfRows, Fp8Tensor):
    """weight F8_E4M3 [N, K], weight_scale [N] or []; has_input_scale: input_scale []."""

    per_channel: bool
    has_input_scale: bool

    storage: ClassVar[str] = "quark_fp8"
    methods: ClassVar[tuple[str, ...]] = _METHODS
    word_rows: ClassVar[int] = 1

    def tensors(self, name: str, shape: tuple[int, ...]) -> tuple[OutputTensor, ...]:
        codes, scale, of_inputs = super().tensors(name, shape)
        own = OutputTensor(scale.name, scale.dtype, self._number_shape(shape))
        return (codes, own, of_inputs) if self.has_input_scale else (codes, own)

    def accepted_dtypes(self, tensor: OutputTensor) -> tuple[DType, ...]:
        return _NUMBER_DTYPES if tensor.dtype == DType.F32 else (tensor.dtype,)

    def places(self, rows: range, columns: range, shape: Sequence[int]) -> Sequence[Place]:
        of_inputs = [(range(1), None)] * self.has_input_scale
        return [(rows, columns), (self._number_rows(rows), None), *of_inputs]

    def encoded(self, tensors: Sequence[torch.Tensor]) -> EncodedWeight:
        scale = tensors[1].reshape(-1, 1).expand(len(tensors[0]), 1)
        return EncodedWeight(self, tensors[0], scale)


@dataclass(frozen=True)
class QuarkMxFp4(ReadOnlyFormat, MxFp4Packed):
    """weight U8 [N, K/2], weight_scale U8 [N, K/32]."""

    storage: ClassVar[str] = "quark_mxfp4"
    methods: ClassVar[tuple[str, ...]] = _METHODS
    held_by: ClassVar[frozenset[str]] = frozenset()

    def tensors(self, name: str, shape: tuple[int, ...]) -> tuple[OutputTensor, ...]:
        (rows, columns), module = shape, name.removesuffix(".weight")
        return (
            OutputTensor(name, DType.U8, (rows, columns // 2)),
            OutputTensor(f"{module}.{COMPRESSED_SCALE}", DType.U8, (rows, columns // MX_GROUP)),
        )
