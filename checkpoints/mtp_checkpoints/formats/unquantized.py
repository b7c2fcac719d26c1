"""Unquantized weights: one tensor, in bf16 where it is written anew."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from mtp_checkpoints.dtypes import DType, OutputTensor
from mtp_checkpoints.formats.base import EncodedWeight, WeightFormat
from mtp_checkpoints.formats.storage import Storage

if TYPE_CHECKING:
    import torch

    from mtp_kernels.quantize import ErrorStats, Fp8Block
    from mtp_kernels.quantize.array_conversions import Converted, Rows


@dataclass(frozen=True)
class Unquantized(WeightFormat):
    """Values themselves; a converted weight is rounded once to bf16."""

    storage: ClassVar[Storage] = Storage.BF16
    operation: ClassVar[str] = "dequantize"
    compiled_sources: ClassVar[frozenset[Storage]] = frozenset({Storage.FP8_BLOCK})

    def operation_on(self, source: WeightFormat) -> str:
        return f"{self.operation}_{source.storage}"

    def tensors(self, name: str, shape: tuple[int, ...]) -> tuple[OutputTensor, ...]:
        return (OutputTensor(name, DType.BF16, shape),)

    def quantize(
        self, source: torch.Tensor | Fp8Block, scale_rule: str
    ) -> tuple[tuple[torch.Tensor, ...], ErrorStats]:
        import torch

        from mtp_kernels import quantize

        if isinstance(source, quantize.Fp8Block):
            weights, error = quantize.dequantize_fp8_block(source, torch.bfloat16)
            return (weights,), error
        weights = source.to(torch.bfloat16)
        wide = source.double()
        lost = wide - weights.double()
        stats = quantize.ErrorStats(
            elements=source.numel(),
            signal_energy=math.fsum(wide.square().sum(dim=1).tolist()),
            error_energy=math.fsum(lost.square().sum(dim=1).tolist()),
            max_error=float(lost.abs().max()),
        )
        return (weights,), stats

    def quantize_rows(self, rows: Rows, scale_rule: str) -> Converted | None:
        from mtp_kernels.quantize import array_conversions

        return array_conversions.to_bf16(rows)

    def dequantize(
        self, codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        raise AssertionError("unquantized weights have no scales")


UNQUANTIZED = Unquantized()


def unquantized(values: torch.Tensor) -> EncodedWeight:
    """Return a weight that holds its values themselves."""
    return EncodedWeight(UNQUANTIZED, values)
