"""compressed-tensors' int-quantized weights: int8 with a scale per output channel, unpacked.

llm-compressor writes it for schemes with int8 activations (W8A8).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from mtp_checkpoints.dtypes import DType, OutputTensor
from mtp_checkpoints.formats.base import COMPRESSED_SCALE, ReadOnlyFormat
from mtp_checkpoints.formats.compressed import COMPRESSED, WeightsEntry
from mtp_checkpoints.formats.verification import INT8_GATE, FormatGate

if TYPE_CHECKING:
    import torch

    from mtp_kernels.quantize.row_codes import RowCodes

_LAYOUT = "int-quantized"
_SCALE_DTYPES = (DType.BF16, DType.F16, DType.F32)


@dataclass(frozen=True)
class Int8Unpacked(ReadOnlyFormat):
    """Codes I8 [N, K], weight_scale [N, 1]."""

    storage: ClassVar[str] = "int8_unpacked"
    gate: ClassVar[FormatGate] = INT8_GATE
    methods: ClassVar[tuple[str, ...]] = (COMPRESSED,)
    has_row_codes: ClassVar[bool] = True
    in_words: ClassVar[str] = "int-quantized int8 per channel"

    @classmethod
    def of_entry(cls, entry: WeightsEntry) -> Int8Unpacked | None:
        fits = entry.has_numbers(_LAYOUT, kind="int", bits=8, strategy="channel")
        return cls() if fits else None

    def tensors(self, name: str, shape: tuple[int, ...]) -> tuple[OutputTensor, ...]:
        module = name.removesuffix(".weight")
        return (
            OutputTensor(name, DType.I8, shape),
            OutputTensor(f"{module}.{COMPRESSED_SCALE}", DType.BF16, (shape[0], 1)),
        )

    def accepted_dtypes(self, tensor: OutputTensor) -> tuple[DType, ...]:
        return _SCALE_DTYPES if tensor.dtype == DType.BF16 else (tensor.dtype,)

    def decode(self, codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return (codes.float() * _finite(scale)).to(dtype)

    def row_codes(self, codes: torch.Tensor, scale: torch.Tensor) -> RowCodes:
        from mtp_kernels.quantize.row_codes import RowCodes

        return RowCodes(codes, _finite(scale), codes.shape[1])


def _finite(scale: torch.Tensor) -> torch.Tensor:
    """Return scales in float32 (ValueError for those that are not finite)."""
    factors = scale.float()
    if not factors.isfinite().all():
        raise ValueError("channel scale: expected finite numbers")
    return factors
