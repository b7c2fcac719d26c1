"""ModelOpt's layouts: nvfp4 in groups of 16 and fp8 with one scale. Source: TensorRT Model
Optimizer, `export/quant_utils.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from mtp_checkpoints.dtypes import DType, OutputTensor
from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.formats.base import EncodedWeight, ReadOnlyFormat, RowSource
from mtp_checkpoints.formats.nvfp4 import NVFP4_GROUP
from mtp_checkpoints.formats.verification import FOUR_BIT_GATE, FP8_GATE, FormatGate

if TYPE_CHECKING:
    import torch


class _ModelOpt(ReadOnlyFormat):
    """Codes, their scales, and numbers for the whole matrix."""

    methods: ClassVar[tuple[str, ...]] = ("modelopt",)

    def check_constants(self, tensors: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> None:
        for name, stored in tensors.items():
            if not (stored.isfinite() & (stored > 0)).all():
                raise InvalidInputError(
                    f"Tensor {name} is no scale",
                    expected="a finite number above 0",
                    found=stored.tolist(),
                )


@dataclass(frozen=True)
class NvFp4(_ModelOpt):
    """Codes U8 [N, K/2], two e2m1 numbers in each, the lower bits first; weight_scale F8_E4M3
    [N, K/16], weight_scale_2 F32 [], input_scale F32 []. A weight is code * scale * second scale.
    """

    storage: ClassVar[str] = "nvfp4"
    gate: ClassVar[FormatGate] = FOUR_BIT_GATE
    elements_per_code: ClassVar[int] = 2

    @property
    def k_divisor(self) -> int:
        return NVFP4_GROUP

    @property
    def k_unit(self) -> str:
        return "the group size"

    def tensors(self, name: str, shape: tuple[int, ...]) -> tuple[OutputTensor, ...]:
        (rows, columns), module = shape, name.removesuffix(".weight")
        return (
            OutputTensor(name, DType.U8, (rows, columns // self.elements_per_code)),
            OutputTensor(f"{module}.weight_scale", DType.F8_E4M3, (rows, columns // NVFP4_GROUP)),
            OutputTensor(f"{module}.weight_scale_2", DType.F32, ()),
            OutputTensor(f"{module}.input_scale", DType.F32, ()),
        )

    def encoded(self, tensors: Sequence[torch.Tensor]) -> EncodedWeight:
        return EncodedWeight(self, tensors[0], tensors[1].float() * tensors[2].float())

    def encoded_rows(self, source: RowSource, start: int, stop: int) -> EncodedWeight:
        scale, second = source.scale[start:stop], source.others[1]
        return self.encoded((source.codes(start, stop), scale, second))

    def decode(self, codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        from mtp_kernels.quantize.block_floats import dequantize_nvfp4

        if not scale.isfinite().all():
            raise ValueError("group scale: expected finite numbers")
        return dequantize_nvfp4(codes, scale).to(dtype)


@dataclass(frozen=True)
class Fp8Tensor(_ModelOpt):
    """Codes F8_E4M3 [N, K]; weight_scale F32 [], input_scale F32 []."""

    storage: ClassVar[str] = "fp8_tensor"
    gate: ClassVar[FormatGate] = FP8_GATE

    def tensors(self, name: str, shape: tuple[int, ...]) -> tuple[OutputTensor, ...]:
        module = name.removesuffix(".weight")
        return (
            OutputTensor(name, DType.F8_E4M3, shape),
            OutputTensor(f"{module}.weight_scale", DType.F32, ()),
            OutputTensor(f"{module}.input_scale", DType.F32, ()),
        )

    def encoded(self, tensors: Sequence[torch.Tensor]) -> EncodedWeight:
        return EncodedWeight(self, tensors[0], tensors[1].reshape(1, 1))

    def encoded_rows(self, source: RowSource, start: int, stop: int) -> EncodedWeight:
        return self.encoded((source.codes(start, stop), source.others[0]))

    def decode(self, codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if not scale.isfinite().all():
            raise ValueError("scale: expected a finite number")
        values = codes.float()
        if values.isnan().any():
            raise ValueError("e4m3 codes: expected numbers, found NaN")
        return (values * scale.float()).to(dtype)
