"""fp8 with a scale per output channel, as compressed-tensors has it: GLM's fp8 releases.

It is read; no scheme writes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from mtp_checkpoints.dtypes import WIDE_SCALE_DTYPES, DType, OutputTensor
from mtp_checkpoints.formats.base import COMPRESSED_SCALE, KernelFormat
from mtp_checkpoints.formats.compressed import COMPRESSED, WeightsEntry, group, numbers
from mtp_checkpoints.formats.verification import FP8_GATE, FormatGate

if TYPE_CHECKING:
    import torch

_LAYOUT = "float-quantized"
_LARGEST = 448.0


@dataclass(frozen=True)
class Fp8Channel(KernelFormat):
    """Codes F8_E4M3 [N, K], weight_scale [N, 1]."""

    storage: ClassVar[str] = "fp8_channel"
    gate: ClassVar[FormatGate] = FP8_GATE
    methods: ClassVar[tuple[str, ...]] = (COMPRESSED,)
    operation: ClassVar[str] = "quantize_fp8_channel"
    in_words: ClassVar[str] = "float-quantized fp8 per channel"
    of_no_scheme: ClassVar[bool] = True

    @classmethod
    def of_entry(cls, entry: WeightsEntry) -> Fp8Channel | None:
        fits = entry.has_numbers(_LAYOUT, kind="float", bits=8, strategy="channel")
        return cls() if fits else None

    def group(self, *, activations_fp8: bool) -> dict[str, Any]:
        activations = numbers(8, "float", "token", dynamic=True)
        return group(_LAYOUT, numbers(8, "float", "channel"), activations)

    def tensors(self, name: str, shape: tuple[int, ...]) -> tuple[OutputTensor, ...]:
        module = name.removesuffix(".weight")
        return (
            OutputTensor(name, DType.F8_E4M3, shape),
            OutputTensor(f"{module}.{COMPRESSED_SCALE}", DType.F32, (shape[0], 1)),
        )

    def accepted_dtypes(self, tensor: OutputTensor) -> tuple[DType, ...]:
        return (tensor.dtype,) if tensor.dtype == DType.F8_E4M3 else WIDE_SCALE_DTYPES

    def encode(self, values: torch.Tensor, scale_rule: str) -> tuple[torch.Tensor, ...]:
        import torch

        largest = values.abs().amax(dim=1, keepdim=True)
        scale = torch.where(largest > 0, largest / _LARGEST, 1.0)
        codes = (values / scale).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
        return codes, scale
