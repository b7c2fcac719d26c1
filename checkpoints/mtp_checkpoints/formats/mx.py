"""compressed-tensors' microscaling formats: a power of two, e8m0, for groups of 32 numbers e2m1 or
e4m3. Sources: compressed-tensors `compressors/mxfp4`, `mxfp8`; OCP Microscaling Formats 1.0."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from mtp_checkpoints.dtypes import DType, OutputTensor
from mtp_checkpoints.formats.base import COMPRESSED_SCALE, EncodedWeight, WeightFormat
from mtp_checkpoints.formats.compressed import COMPRESSED, WeightsEntry, group, numbers
from mtp_checkpoints.formats.verification import (
    FOUR_BIT_GATE,
    FP8_GATE,
    Bug,
    FormatGate,
    shifted_exponents,
    swapped_pairs,
)

if TYPE_CHECKING:
    import torch

    from mtp_kernels.quantize import ErrorStats, Fp8Block
    from mtp_kernels.quantize.layouts import RowStats
    from mtp_kernels.quantize.row_codes import RowCodes

MX_GROUP = 32
_SWEEP = "mse"  # the scale rule


@dataclass(frozen=True)
class _MicroScaled(WeightFormat):
    """Codes in groups of 32, weight_scale U8 [N, K/32]: exponents of powers of two, plus 127."""

    layout: ClassVar[str]
    bits: ClassVar[int]
    has_row_codes: ClassVar[bool] = True
    methods: ClassVar[tuple[str, ...]] = (COMPRESSED,)
    compiled_sources: ClassVar[frozenset[str]] = frozenset({"bf16", "fp8_block"})

    @property
    def k_divisor(self) -> int:
        return MX_GROUP

    @property
    def k_unit(self) -> str:
        return "the group size"

    @classmethod
    def of_entry(cls, entry: WeightsEntry) -> WeightFormat | None:
        fits = entry.has_numbers(cls.layout, kind="float", bits=cls.bits, strategy="group")
        return cls() if fits and entry.group_size == MX_GROUP else None

    def numbers(self) -> dict[str, Any]:
        """Return the description of its weights; vLLM knows mxfp8 by the dtype of its scales."""
        scale = {"group_size": MX_GROUP, "scale_dtype": "torch.uint8"}
        return numbers(self.bits, "float", "group") | scale

    @abstractmethod
    def rows_of(
        self, values: torch.Tensor, *, sweep: bool
    ) -> tuple[torch.Tensor, torch.Tensor, RowStats]:
        """Return codes, scales and the error of fp32 rows [n, K]."""

    def encoded(self, tensors: Sequence[torch.Tensor]) -> EncodedWeight:
        from mtp_kernels.quantize.block_floats import e8m0_values

        return EncodedWeight(self, tensors[0], e8m0_values(tensors[1]))

    def quantize(
        self, source: torch.Tensor | Fp8Block, scale_rule: str
    ) -> tuple[tuple[torch.Tensor, ...], ErrorStats]:
        from mtp_kernels import quantize

        values = quantize.checked_values(source)
        codes, scale, stats = self.rows_of(values, **self.kernel_options(scale_rule))
        return (codes, scale), quantize.error_stats(values, stats)

    def kernel_options(self, scale_rule: str) -> dict[str, Any]:
        return {"sweep": scale_rule == _SWEEP}


@dataclass(frozen=True)
class MxFp4Packed(_MicroScaled):
    """weight_packed U8 [N, K/2]: two e2m1 numbers in a byte, the lower bits first."""

    storage: ClassVar[str] = "mxfp4_packed"
    gate: ClassVar[FormatGate] = FOUR_BIT_GATE
    bugs: ClassVar[tuple[Bug, ...]] = (swapped_pairs(), *shifted_exponents())
    operation: ClassVar[str] = "quantize_mxfp4"
    elements_per_code: ClassVar[int] = 2
    held_by: ClassVar[frozenset[str]] = frozenset({"mxfp4"})
    layout: ClassVar[str] = "mxfp4-pack-quantized"
    bits: ClassVar[int] = 4
    in_words: ClassVar[str] = layout

    def group(self, *, activations_fp8: bool) -> dict[str, Any]:
        return group(self.layout, self.numbers(), None)

    def tensors(self, name: str, shape: tuple[int, ...]) -> tuple[OutputTensor, ...]:
        (rows, columns), module = shape, name.removesuffix(".weight")
        return (
            OutputTensor(f"{module}.weight_packed", DType.U8, (rows, columns // 2)),
            OutputTensor(f"{module}.{COMPRESSED_SCALE}", DType.U8, (rows, columns // MX_GROUP)),
        )

    def rows_of(
        self, values: torch.Tensor, *, sweep: bool
    ) -> tuple[torch.Tensor, torch.Tensor, RowStats]:
        from mtp_kernels.quantize.block_floats import quantize_mxfp4

        return quantize_mxfp4(values, sweep=sweep)

    def decode(self, codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        from mtp_kernels.quantize.block_floats import dequantize_e2m1

        _check_finite(scale)
        return dequantize_e2m1(codes, scale).to(dtype)

    def row_codes(self, codes: torch.Tensor, scale: torch.Tensor) -> RowCodes:
        from mtp_kernels.quantize.row_codes import RowCodes

        _check_finite(scale)
        return RowCodes(codes, scale, MX_GROUP)


@dataclass(frozen=True)
class MxFp8(_MicroScaled):
    """weight F8_E4M3 [N, K]; inputs in the same numbers, whose scales are computed at run time."""

    storage: ClassVar[str] = "mxfp8"
    gate: ClassVar[FormatGate] = FP8_GATE
    bugs: ClassVar[tuple[Bug, ...]] = shifted_exponents()
    operation: ClassVar[str] = "quantize_mxfp8"
    layout: ClassVar[str] = "mxfp8-quantized"
    bits: ClassVar[int] = 8
    in_words: ClassVar[str] = layout

    def group(self, *, activations_fp8: bool) -> dict[str, Any]:
        return group(self.layout, self.numbers(), self.numbers() | {"dynamic": True})

    def tensors(self, name: str, shape: tuple[int, ...]) -> tuple[OutputTensor, ...]:
        (rows, columns), module = shape, name.removesuffix(".weight")
        return (
            OutputTensor(name, DType.F8_E4M3, shape),
            OutputTensor(f"{module}.{COMPRESSED_SCALE}", DType.U8, (rows, columns // MX_GROUP)),
        )

    def rows_of(
        self, values: torch.Tensor, *, sweep: bool
    ) -> tuple[torch.Tensor, torch.Tensor, RowStats]:
        from mtp_kernels.quantize.block_floats import quantize_mxfp8

        return quantize_mxfp8(values, sweep=sweep)

    def decode(self, codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        from mtp_kernels.quantize.block_floats import dequantize_mxfp8

        _check_finite(scale)
        values = dequantize_mxfp8(codes, scale)
        if values.isnan().any():
            raise ValueError("e4m3 codes: expected numbers, found NaN")
        return values.to(dtype)

    def row_codes(self, codes: torch.Tensor, scale: torch.Tensor) -> RowCodes:
        from mtp_kernels.quantize.checks import check_e4m3
        from mtp_kernels.quantize.row_codes import RowCodes

        _check_finite(scale)
        check_e4m3(codes)
        return RowCodes(codes, scale, MX_GROUP)


def _check_finite(scale: torch.Tensor) -> None:
    if not scale.isfinite().all():
        raise ValueError("group scale: expected exponents below 255, found 255 (NaN)")
