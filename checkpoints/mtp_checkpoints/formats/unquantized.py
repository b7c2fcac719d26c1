"""Unquantized weights: one tensor, in bf16 where it is written anew, or in half precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from mtp_checkpoints.dtypes import DType, OutputTensor
from mtp_checkpoints.formats.base import EncodedWeight, WeightFormat
from mtp_checkpoints.formats.rows import RowSource
from mtp_checkpoints.formats.verification import BF16_GATE, FormatGate

if TYPE_CHECKING:
    import torch

    from mtp_kernels.quantize import ErrorStats, Fp8Block


class Values(WeightFormat):
    """One tensor of a weight [N, K], which holds the values themselves in a dtype."""

    dtype: ClassVar[DType]

    def tensors(self, name: str, shape: tuple[int, ...]) -> tuple[OutputTensor, ...]:
        return (OutputTensor(name, self.dtype, shape),)

    def encoded(self, tensors: Sequence[torch.Tensor]) -> EncodedWeight:
        return EncodedWeight(self, tensors[0])

    def encoded_rows(self, source: RowSource, start: int, stop: int) -> EncodedWeight:
        return EncodedWeight(self, source.codes(start, stop))

    def decode(self, codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        raise AssertionError("values have no scales")


@dataclass(frozen=True)
class Unquantized(Values):
    """Values themselves; a converted weight is rounded once to bf16."""

    dtype: ClassVar[DType] = DType.BF16
    storage: ClassVar[str] = "bf16"
    gate: ClassVar[FormatGate] = BF16_GATE
    operation: ClassVar[str] = "dequantize"
    compiled_sources: ClassVar[frozenset[str]] = frozenset({"fp8_block"})

    def operation_on(self, source: WeightFormat) -> str:
        return f"{self.operation}_{source.storage}"

    def encode(self, values: torch.Tensor, scale_rule: str) -> tuple[torch.Tensor, ...]:
        import torch

        return (values.to(torch.bfloat16),)

    def quantize(
        self, source: torch.Tensor | Fp8Block, scale_rule: str
    ) -> tuple[tuple[torch.Tensor, ...], ErrorStats]:
        import torch

        from mtp_kernels import quantize

        if isinstance(source, torch.Tensor):
            return super().quantize(source, scale_rule)
        weights, error = quantize.dequantize_fp8_block(source, torch.bfloat16)
        return (weights,), error


UNQUANTIZED = Unquantized()


def unquantized(values: torch.Tensor) -> EncodedWeight:
    """Return a weight that holds its values themselves."""
    return EncodedWeight(UNQUANTIZED, values)
