"""nvfp4: e2m1 codes in groups of 16, a scale e4m3 for each, and one number for the whole matrix.

Linears that engines join must share that number: they take one of the parts for all of them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from mtp_checkpoints.dtypes import DType, OutputTensor
from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.formats.base import COMPRESSED_SCALE, EncodedWeight, WeightFormat
from mtp_checkpoints.formats.compressed import COMPRESSED, WeightsEntry, group, numbers
from mtp_checkpoints.formats.rows import RowSource
from mtp_checkpoints.formats.verification import (
    FOUR_BIT_GATE,
    Bug,
    FormatGate,
    swapped_pairs,
)

if TYPE_CHECKING:
    import torch

    from mtp_kernels.quantize import ErrorStats, Fp8Block
    from mtp_kernels.quantize.array_conversions import Converted, Rows
    from mtp_kernels.quantize.gptq import Grid
    from mtp_kernels.quantize.row_codes import RowCodes

NVFP4_GROUP = 16
_LAYOUT = "nvfp4-pack-quantized"
_SWEEP = "mse"  # the scale rule


class NvFp4Names(NamedTuple):
    """Names of the tensors of a weight; of_matrix and of_inputs are numbers for all of it."""

    codes: str
    scale: str
    of_matrix: str
    of_inputs: str


def check_above_zero(tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse numbers of a whole matrix that are no scales (InvalidInputError)."""
    for name, stored in tensors.items():
        if not (stored.isfinite() & (stored > 0)).all():
            raise InvalidInputError(
                f"Tensor {name} is no scale",
                expected="a finite number above 0",
                found=stored.tolist(),
            )


@dataclass(frozen=True)
class NvFp4Format(WeightFormat):
    """Codes U8 [N, K/2], two e2m1 numbers in each, the lower bits first; scale F8_E4M3 [N, K/16];
    a number for the whole matrix.

    amax is the largest magnitude of a weight and of those that it is joined with; None takes that
    of the rows that are quantized. inputs_amax is that of what goes into it, None where it is not
    known.
    """

    amax: float | None = field(default=None, compare=False, kw_only=True)
    inputs_amax: float | None = field(default=None, compare=False, kw_only=True)

    gate: ClassVar[FormatGate] = FOUR_BIT_GATE
    bugs: ClassVar[tuple[Bug, ...]] = (swapped_pairs(),)
    operation: ClassVar[str] = "quantize_nvfp4"
    elements_per_code: ClassVar[int] = 2
    of_whole_matrix: ClassVar[bool] = True
    of_no_scheme: ClassVar[bool] = True
    has_grid: ClassVar[bool] = True
    number_shape: ClassVar[tuple[int, ...]] = (1,)  # of those of the matrix and of its inputs
    has_input_scale: ClassVar[bool] = False
    divides: ClassVar[bool] = False  # the number of the matrix divides the scales
    has_row_codes: ClassVar[bool] = True
    compiled_sources: ClassVar[frozenset[str]] = frozenset({"bf16", "fp8_block"})

    @property
    def k_divisor(self) -> int:
        return NVFP4_GROUP

    @property
    def k_unit(self) -> str:
        return "the group size"

    def of_amax(self, amax: float) -> Self:
        return replace(self, amax=amax)

    def of_inputs(self, amax: float) -> Self:
        """Return the format for inputs up to a magnitude."""
        return replace(self, inputs_amax=amax)

    @abstractmethod
    def names(self, name: str) -> NvFp4Names:
        """Return the names of the tensors of a weight."""

    def tensors(self, name: str, shape: tuple[int, ...]) -> tuple[OutputTensor, ...]:
        (rows, columns), own = shape, self.names(name)
        every = (
            OutputTensor(own.codes, DType.U8, (rows, columns // self.elements_per_code)),
            OutputTensor(own.scale, DType.F8_E4M3, (rows, columns // NVFP4_GROUP)),
            OutputTensor(own.of_matrix, DType.F32, self.number_shape),
            OutputTensor(own.of_inputs, DType.F32, self.number_shape),
        )
        return every if self.has_input_scale else every[:-1]

    def constants(self, shape: tuple[int, ...]) -> tuple[Any, ...]:
        """Return the number of the inputs, 1 where their amax is not known: that of 2688, which
        leaves their scales as they are."""
        if not self.has_input_scale:
            return ()
        return (self._number(1.0 if self.inputs_amax is None else _divisor(self.inputs_amax)),)

    @abstractmethod
    def multiplier(self, scale: torch.Tensor, of_matrix: torch.Tensor) -> torch.Tensor:
        """Return the fp32 multipliers of fp32 scales under the number of the matrix."""

    def encoded(self, tensors: Sequence[torch.Tensor]) -> EncodedWeight:
        codes, scale, of_matrix = tensors[:3]
        return EncodedWeight(self, codes, self.multiplier(scale.float(), of_matrix.float()))

    def encoded_rows(self, source: RowSource, start: int, stop: int) -> EncodedWeight:
        scale, of_matrix = source.scale[start:stop], source.others[1]
        return self.encoded((source.codes(start, stop), scale, of_matrix))

    def quantize(
        self, source: torch.Tensor | Fp8Block, scale_rule: str
    ) -> tuple[tuple[torch.Tensor, ...], ErrorStats]:
        import torch

        from mtp_kernels import quantize
        from mtp_kernels.quantize import block_floats

        values = quantize.checked_values(source)
        made = self if self.amax is not None else self.of_amax(float(values.abs().max()))
        options = made.kernel_options(scale_rule)
        codes, scale, stats = block_floats.quantize_nvfp4(values, **options)
        of_matrix = torch.from_numpy(made.of_matrix()).to(values.device)
        return (codes, scale, of_matrix), quantize.error_stats(values, stats)

    def quantize_rows(self, rows: Rows, scale_rule: str) -> Converted | None:
        converted = super().quantize_rows(rows, scale_rule)
        if converted is None:
            return None
        return converted._replace(outputs=(*converted.outputs, self.of_matrix()))

    def grid(self, tensors: Sequence[torch.Tensor]) -> Grid:
        from mtp_kernels.quantize.gptq import Grid

        return Grid.nvfp4(self.multiplier(tensors[1].float(), tensors[2].float()))

    @abstractmethod
    def is_reciprocal(self, number: float) -> bool:
        """Return True for a number of the matrix that only weights above 2688 have, and the
        reciprocals of others'."""

    def of_matrix(self) -> Any:
        """Return the number of the matrix, as an array of the tensor's shape."""
        return self._number(self.divisor)

    @abstractmethod
    def _number(self, divisor: float) -> Any:
        """Return a number that scales are multiplied by as the layout has it, as an array."""

    def kernel_options(self, scale_rule: str) -> dict[str, Any]:
        return {"divisor": self.divisor, "sweep": scale_rule == _SWEEP}

    @property
    def divisor(self) -> float:
        """Number that the scales are multiplied by before they are rounded."""
        return _divisor(self.amax or 0.0)

    def decode(self, codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        from mtp_kernels.quantize.block_floats import dequantize_e2m1

        _check_finite(scale)
        return dequantize_e2m1(codes, scale).to(dtype)

    def row_codes(self, codes: torch.Tensor, scale: torch.Tensor) -> RowCodes:
        from mtp_kernels.quantize.row_codes import RowCodes

        _check_finite(scale)
        return RowCodes(codes, scale, NVFP4_GROUP)

    def check_constants(self, tensors: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> None:
        check_above_zero(tensors)


@dataclass(frozen=True)
class NvFp4Packed(NvFp4Format):
    """compressed-tensors' layout, whose number for the matrix divides the scales: weight_packed,
    weight_scale, weight_global_scale F32 [1]."""

    storage: ClassVar[str] = "nvfp4_packed"
    methods: ClassVar[tuple[str, ...]] = (COMPRESSED,)
    in_words: ClassVar[str] = "nvfp4-pack-quantized"
    divides: ClassVar[bool] = True

    @classmethod
    def of_entry(cls, entry: WeightsEntry) -> NvFp4Packed | None:
        fits = entry.has_numbers(_LAYOUT, kind="float", bits=4, strategy="tensor_group")
        fits = fits and entry.group_size == NVFP4_GROUP
        return cls() if fits and entry.input_scale == cls.has_input_scale else None

    def group(self, *, activations_fp8: bool) -> dict[str, Any]:
        inputs = _numbers() | {"dynamic": "local"} if self.has_input_scale else None
        return group(_LAYOUT, _numbers(), inputs)

    def names(self, name: str) -> NvFp4Names:
        module = name.removesuffix(".weight")
        return NvFp4Names(
            f"{module}.weight_packed",
            f"{module}.{COMPRESSED_SCALE}",
            f"{module}.weight_global_scale",
            f"{module}.input_global_scale",
        )

    def multiplier(self, scale: torch.Tensor, of_matrix: torch.Tensor) -> torch.Tensor:
        return scale / of_matrix

    def is_reciprocal(self, number: float) -> bool:
        return number < 1

    def _number(self, divisor: float) -> Any:
        import numpy as np

        return np.full(1, divisor, np.float32)


@dataclass(frozen=True)
class NvFp4PackedA4(NvFp4Packed):
    """The same for inputs in nvfp4, with input_global_scale F32 [1]: 2688 over their amax."""

    storage: ClassVar[str] = "nvfp4_packed_a4"
    in_words: ClassVar[str] = "nvfp4-pack-quantized with inputs in nvfp4"
    has_input_scale: ClassVar[bool] = True


def _divisor(amax: float) -> float:
    from mtp_kernels.quantize.block_floats import nvfp4_divisor

    return nvfp4_divisor(amax)


def _check_finite(scale: torch.Tensor) -> None:
    if not scale.isfinite().all():
        raise ValueError("group scale: expected finite numbers")


def _numbers() -> dict[str, Any]:
    scale = {"group_size": NVFP4_GROUP, "scale_dtype": "torch.float8_e4m3fn"}
    return numbers(4, "float", "tensor_group") | scale
