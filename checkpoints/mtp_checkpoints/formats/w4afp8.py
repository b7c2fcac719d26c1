"""SGLang's w4afp8: int4 experts in groups of 128 that run with activations in fp8."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from mtp_checkpoints.dtypes import DType, OutputTensor
from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.formats.base import WeightFormat
from mtp_checkpoints.formats.verification import FOUR_BIT_GATE, Bug, FormatGate, packing_bugs

if TYPE_CHECKING:
    import torch

    from mtp_kernels import quantize
    from mtp_kernels.quantize.array_conversions import Converted, Rows
    from mtp_kernels.weight_statistics import WeightStatistics

W4AFP8_GROUP = 128
_INPUT_SCALES = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


@dataclass(frozen=True)
class W4AFp8(WeightFormat):
    """Codes I8 [N, K/2], scale F32 [N, K/128], and an input scale F32 [1] beside the module."""

    storage: ClassVar[str] = "w4afp8"
    gate: ClassVar[FormatGate] = FOUR_BIT_GATE
    bugs: ClassVar[tuple[Bug, ...]] = packing_bugs(4)
    methods: ClassVar[tuple[str, ...]] = ("w4afp8",)
    code_offset: ClassVar[int | None] = 8
    operation: ClassVar[str] = "quantize_w4afp8"
    compiled_sources: ClassVar[frozenset[str]] = frozenset({"bf16", "fp8_block"})
    elements_per_code: ClassVar[int] = 2

    @property
    def k_divisor(self) -> int:
        return W4AFP8_GROUP

    @property
    def k_unit(self) -> str:
        return "the group size"

    def tensors(self, name: str, shape: tuple[int, ...]) -> tuple[OutputTensor, ...]:
        (rows, columns), module = shape, name.removesuffix(".weight")
        parent, _, projection = module.rpartition(".")
        return (
            OutputTensor(name, DType.I8, (rows, columns // self.elements_per_code)),
            OutputTensor(f"{name}_scale_inv", DType.F32, (rows, columns // W4AFP8_GROUP)),
            OutputTensor(f"{parent}.{_INPUT_SCALES[projection]}.input_scale", DType.F32, (1,)),
        )

    def stored(self, codes: torch.Tensor, scale: torch.Tensor) -> quantize.W4AFp8:
        from mtp_kernels import quantize

        return quantize.W4AFp8(codes, scale)

    def quantize(
        self, source: torch.Tensor | quantize.Fp8Block, scale_rule: str
    ) -> tuple[tuple[torch.Tensor, ...], quantize.ErrorStats]:
        from mtp_kernels import quantize

        result, error = quantize.quantize_w4afp8(source, scale_rule=scale_rule)
        return (result.packed, result.scale), error

    def quantize_rows(self, rows: Rows, scale_rule: str) -> Converted | None:
        from mtp_kernels.quantize import array_conversions

        return array_conversions.to_w4afp8(rows, scale_rule)

    def decode(self, codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        from mtp_kernels import quantize

        return quantize.dequantize_w4afp8(self.stored(codes, scale), dtype)

    def statistics(self, codes: torch.Tensor, scale: torch.Tensor) -> WeightStatistics:
        from mtp_kernels import weight_statistics

        return weight_statistics.w4afp8_statistics(self.stored(codes, scale))

    def constants(self, shape: tuple[int, ...]) -> tuple[Any, ...]:
        """Return an input scale of 1, which leaves the activations as they are."""
        import numpy as np

        return (np.ones(1, np.float32),)

    def check_constants(self, tensors: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> None:
        for name, scale in tensors.items():
            if not (scale.isfinite() & (scale > 0)).all():
                raise InvalidInputError(
                    f"Tensor {name} is no scale",
                    expected="a finite number above 0",
                    found=scale.tolist(),
                )
