"""A number format and schemes with it, as one file brings them; run as a program, it is mtp-export
with both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from mtp_checkpoints.dtypes import DType, OutputTensor
from mtp_checkpoints.families.base import Role
from mtp_checkpoints.formats import FORMATS
from mtp_checkpoints.formats.base import WeightFormat
from mtp_checkpoints.formats.compressed import COMPRESSED, WeightsEntry, group, numbers
from mtp_checkpoints.formats.verification import Bug, FormatGate, RunGate
from mtp_export.schemes import SCHEMES
from mtp_export.schemes.scheme import Scheme, every_linear

LAYOUT, _LARGEST = "toy-quantized", 31.0


@dataclass(frozen=True)
class Int6Channel(WeightFormat):
    """Codes weight_int6 I8 [N, K] in [-31, 31], scale weight_scale F32 [N, 1]."""

    storage: ClassVar[str] = "int6_channel"
    operation: ClassVar[str] = "quantize_int6_channel"
    gate: ClassVar[FormatGate] = FormatGate(25.0, RunGate(0.05, 0.90, 3.0))
    methods: ClassVar[tuple[str, ...]] = (COMPRESSED,)
    in_words: ClassVar[str] = "toy-quantized int6 per channel"
    bugs: ClassVar[tuple[Bug, ...]] = (
        Bug(
            "two's complement was taken for sign and magnitude",
            lambda codes, scale: (_resigned(codes), scale),
        ),
    )

    @classmethod
    def of_entry(cls, entry: WeightsEntry) -> Int6Channel | None:
        described = entry.has_numbers(LAYOUT, kind="int", bits=6, strategy="channel")
        return cls() if described else None

    def group(self, *, activations_fp8: bool) -> dict[str, Any]:
        return group(LAYOUT, numbers(6, "int", "channel"), None)

    def tensors(self, name: str, shape: tuple[int, ...]) -> tuple[OutputTensor, ...]:
        module = name.removesuffix(".weight")
        return (
            OutputTensor(f"{module}.weight_int6", DType.I8, shape),
            OutputTensor(f"{module}.weight_scale", DType.F32, (shape[0], 1)),
        )

    def encode(self, values: torch.Tensor, scale_rule: str) -> tuple[torch.Tensor, ...]:
        scale = (values.abs().amax(dim=1, keepdim=True) / _LARGEST).clamp(min=2.0**-126)
        return torch.round(values / scale).to(torch.int8), scale

    def decode(self, codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if not (scale.isfinite() & (scale > 0)).all():
            raise ValueError("scale: expected finite numbers above 0")
        return (codes.float() * scale).to(dtype)


def _resigned(codes: torch.Tensor) -> torch.Tensor:
    magnitude = codes & 0x7F
    return torch.where(codes < 0, -magnitude, magnitude)


TOY = Int6Channel.storage
SCHEME = Scheme(
    "toy_int6",
    "int6 + bf16",
    every_linear("bf16") | {Role.ROUTED_EXPERT: TOY, Role.DENSE_MLP: TOY, Role.SHARED_EXPERT: TOY},
)
MIXED = Scheme("toy_int6_fp8", "int6 + fp8", every_linear("fp8_block") | {Role.ROUTED_EXPERT: TOY})


if __name__ == "__main__":
    FORMATS[TOY] = Int6Channel
    SCHEMES.update({scheme.name: scheme for scheme in (SCHEME, MIXED)})
    from mtp_export.cli import main

    main()
