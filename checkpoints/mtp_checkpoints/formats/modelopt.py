"""ModelOpt's layouts: nvfp4 in groups of 16 and fp8 with one scale. Source: TensorRT Model
Optimizer, `export/quant_utils.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from mtp_checkpoints.dtypes import DType, OutputTensor
from mtp_checkpoints.formats.base import EncodedWeight, ReadOnlyFormat
from mtp_checkpoints.formats.nvfp4 import NvFp4Format, NvFp4Names, check_above_zero
from mtp_checkpoints.formats.rows import RowSource
from mtp_checkpoints.formats.verification import FP8_GATE, FormatGate

if TYPE_CHECKING:
    import torch

    from mtp_kernels.quantize.row_codes import RowCodes

_METHOD = "modelopt"


@dataclass(frozen=True)
class NvFp4(NvFp4Format):
    """weight, weight_scale, weight_scale_2 F32 [], which multiplies the scales, and input_scale
    F32 []: the inputs' amax over 2688."""

    storage: ClassVar[str] = "nvfp4"
    methods: ClassVar[tuple[str, ...]] = (_METHOD,)
    number_shape: ClassVar[tuple[int, ...]] = ()
    has_input_scale: ClassVar[bool] = True

    def names(self, name: str) -> NvFp4Names:
        module = name.removesuffix(".weight")
        own = (f"{module}.{last}" for last in ("weight_scale", "weight_scale_2", "input_scale"))
        return NvFp4Names(name, *own)

    def multiplier(self, scale: torch.Tensor, of_matrix: torch.Tensor) -> torch.Tensor:
        return scale * of_matrix

    def is_reciprocal(self, number: float) -> bool:
        return number > 1

    def _number(self, divisor: float) -> Any:
        import numpy as np

        return np.array(np.float32(1) / np.float32(divisor))


@dataclass(frozen=True)
class NvFp4A16(NvFp4):
    """The same without input_scale, for inputs that stay as they are."""

    storage: ClassVar[str] = "nvfp4_a16"
    has_input_scale: ClassVar[bool] = False


@dataclass(frozen=True)
class Fp8Tensor(ReadOnlyFormat):
    """Codes F8_E4M3 [N, K]; weight_scale F32 [], input_scale F32 []."""

    storage: ClassVar[str] = "fp8_tensor"
    methods: ClassVar[tuple[str, ...]] = (_METHOD,)
    gate: ClassVar[FormatGate] = FP8_GATE
    has_row_codes: ClassVar[bool] = True

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

    def row_codes(self, codes: torch.Tensor, scale: torch.Tensor) -> RowCodes:
        from mtp_kernels.quantize.layouts import Fp8Channel
        from mtp_kernels.quantize.row_codes import row_codes

        return row_codes(Fp8Channel(codes, scale.expand(len(codes), 1)))

    def check_constants(self, tensors: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> None:
        check_above_zero(tensors)
