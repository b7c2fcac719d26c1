"""Unquantized weights: one tensor, in bf16 where it is written anew."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from mtp_export.checkpoint.plan import OutputTensor
from mtp_export.schemes.formats.base import EncodedWeight, WeightFormat
from mtp_export.schemes.storage import Storage

if TYPE_CHECKING:
    import torch

    from mtp_kernels.quantize import ErrorStats, Fp8Block


@dataclass(frozen=True)
class Unquantized(WeightFormat):
    """Values themselves; a converted weight is rounded once to bf16."""

    storage: ClassVar[Storage] = Storage.BF16
    operation: ClassVar[str] = "dequantize_fp8_block"

    def tensors(self, name: str, shape: tuple[int, ...]) -> tuple[OutputTensor, ...]:
        return (OutputTensor(name, "BF16", shape),)

    def quantize(
        self, source: torch.Tensor | Fp8Block, scale_rule: str
    ) -> tuple[tuple[torch.Tensor, ...], ErrorStats]:
        import torch

        from mtp_kernels import quantize

        assert isinstance(source, quantize.Fp8Block), "other weights stay as they are stored"
        weights, error = quantize.dequantize_fp8_block(source, torch.bfloat16)
        return (weights,), error

    def dequantize(
        self, codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        raise AssertionError("unquantized weights have no scales")


UNQUANTIZED = Unquantized()


def unquantized(values: torch.Tensor) -> EncodedWeight:
    """Return a weight that holds its values themselves."""
    return EncodedWeight(UNQUANTIZED, values)
