"""MLX's affine groups: codes of 2 to 8 bits as one stream of bits along a row, and per group a
scale and the value of code 0.

Source: MLX, `mx.quantize` and `mx.dequantize`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from mtp_checkpoints.dtypes import DType, OutputTensor
from mtp_checkpoints.formats.base import EncodedWeight, Place, ReadOnlyFormat
from mtp_checkpoints.formats.rows import RowSource
from mtp_checkpoints.formats.verification import FOUR_BIT_GATE, FormatGate

if TYPE_CHECKING:
    import torch

_WORD_BITS = 32
_NUMBER_DTYPES = (DType.BF16, DType.F16, DType.F32)


@dataclass(frozen=True)
class MlxAffine(ReadOnlyFormat):
    """weight U32 [N, K * bits / 32], scales [N, K/group], biases [N, K/group]: a weight is
    code * scale + bias. In memory the scales lie beside the biases, [N, 2 K/group]."""

    group_size: int
    bits: int

    storage: ClassVar[str] = "mlx_affine"
    methods: ClassVar[tuple[str, ...]] = ("mlx",)
    gate: ClassVar[FormatGate] = FOUR_BIT_GATE  # of a model in them, whatever their bits
    word_rows: ClassVar[int] = 1

    @property
    def k_divisor(self) -> int:
        return self.group_size

    @property
    def k_unit(self) -> str:
        return "the group size"

    def columns_of(self, codes: int) -> int:
        return codes * _WORD_BITS // self.bits

    def tensors(self, name: str, shape: tuple[int, ...]) -> tuple[OutputTensor, ...]:
        (rows, columns), module = shape, name.removesuffix(".weight")
        numbers = (rows, columns // self.group_size)
        return (
            OutputTensor(name, DType.U32, (rows, columns * self.bits // _WORD_BITS)),
            OutputTensor(f"{module}.scales", DType.BF16, numbers),
            OutputTensor(f"{module}.biases", DType.BF16, numbers),
        )

    def accepted_dtypes(self, tensor: OutputTensor) -> tuple[DType, ...]:
        return _NUMBER_DTYPES if tensor.dtype == DType.BF16 else (tensor.dtype,)

    def places(self, rows: range, columns: range, shape: Sequence[int]) -> Sequence[Place]:
        words, groups = (
            range(columns.start * bits // unit, -(-columns.stop * bits // unit))
            for bits, unit in ((self.bits, _WORD_BITS), (1, self.group_size))
        )
        return ((rows, words), (rows, groups), (rows, groups))

    def check_constants(self, tensors: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> None:
        """Accept biases whatever they are: they are read with the scales."""

    def encoded(self, tensors: Sequence[torch.Tensor]) -> EncodedWeight:
        import torch

        words, scales, biases = tensors
        # Of unsigned words torch can do little.
        numbers = torch.cat([scales.float(), biases.float()], dim=1)
        return EncodedWeight(self, words.contiguous().view(torch.int32), numbers)

    def encoded_rows(self, source: RowSource, start: int, stop: int) -> EncodedWeight:
        numbers = (one[start:stop] for one in source.others)
        return self.encoded((source.codes(start, stop), *numbers))

    def decode(self, codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if not scale.isfinite().all():
            raise ValueError("group scale or bias: expected finite numbers")
        from mtp_kernels.quantize.affine import dequantized_affine

        return dequantized_affine(codes, self.bits, *scale.chunk(2, dim=1)).to(dtype)
