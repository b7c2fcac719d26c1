"""compressed-tensors' pack-quantized integers: codes in 32-bit words, bf16 scales, the shape."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from mtp_checkpoints.dtypes import DType, OutputTensor
from mtp_checkpoints.formats.base import COMPRESSED_SCALE, GROUP_SIZES, FormatOptions, KernelFormat
from mtp_checkpoints.formats.compressed import (
    COMPRESSED,
    WeightsEntry,
    check_weight_shape,
    group,
    numbers,
)
from mtp_checkpoints.formats.verification import (
    FOUR_BIT_GATE,
    INT8_GATE,
    Bug,
    FormatGate,
    packing_bugs,
)

if TYPE_CHECKING:
    import torch

    from mtp_kernels.quantize.gptq import Grid

_LAYOUT = "pack-quantized"


class _PackQuantized(KernelFormat):
    """weight_packed I32 [N, K / codes per word], weight_scale BF16, weight_shape I64 [2]."""

    methods: ClassVar[tuple[str, ...]] = (COMPRESSED,)

    @abstractmethod
    def _scale_columns(self, columns: int) -> int:
        """Return the number of scales per row."""

    def tensors(self, name: str, shape: tuple[int, ...]) -> tuple[OutputTensor, ...]:
        (rows, columns), module = shape, name.removesuffix(".weight")
        packed = (rows, columns // self.elements_per_code)
        scale = (rows, self._scale_columns(columns))
        return (
            OutputTensor(f"{module}.weight_packed", DType.I32, packed),
            OutputTensor(f"{module}.{COMPRESSED_SCALE}", DType.BF16, scale),
            OutputTensor(f"{module}.weight_shape", DType.I64, (2,)),
        )

    def constants(self, shape: tuple[int, ...]) -> tuple[Any, ...]:
        import numpy as np

        return (np.array(shape, np.int64),)

    def check_constants(self, tensors: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> None:
        for name, stored in tensors.items():
            check_weight_shape(name, stored, shape)


@dataclass(frozen=True)
class Int8Channel(_PackQuantized):
    """int8 with a scale per output channel; scale BF16 [N, 1]."""

    storage: ClassVar[str] = "int8_channel"
    gate: ClassVar[FormatGate] = INT8_GATE
    bugs: ClassVar[tuple[Bug, ...]] = packing_bugs(8)
    code_offset: ClassVar[int | None] = 128
    operation: ClassVar[str] = "quantize_int8_channel"
    compiled_sources: ClassVar[frozenset[str]] = frozenset({"bf16", "fp8_block"})
    elements_per_code: ClassVar[int] = 4
    held_by: ClassVar[frozenset[str]] = frozenset({"q8_0"})
    in_words: ClassVar[str] = "pack-quantized int8 per channel"

    @classmethod
    def of_entry(cls, entry: WeightsEntry) -> Int8Channel | None:
        fits = entry.has_numbers(_LAYOUT, kind="int", bits=8, strategy="channel")
        return cls() if fits else None

    def group(self, *, activations_fp8: bool) -> dict[str, Any]:
        weights = numbers(8, "int", "channel") | {"group_size": None, "actorder": None}
        return group(_LAYOUT, weights, None)

    @property
    def k_divisor(self) -> int:
        return self.elements_per_code

    @property
    def k_unit(self) -> str:
        return "the codes of a word"

    def _scale_columns(self, columns: int) -> int:
        return 1


@dataclass(frozen=True)
class Int4Group(_PackQuantized):
    """int4 with a scale per group of input columns; scale BF16 [N, K / group_size]."""

    group_size: int

    storage: ClassVar[str] = "int4_group"
    gate: ClassVar[FormatGate] = FOUR_BIT_GATE
    bugs: ClassVar[tuple[Bug, ...]] = packing_bugs(4)
    code_offset: ClassVar[int | None] = 8
    operation: ClassVar[str] = "quantize_int4_group"
    compiled_sources: ClassVar[frozenset[str]] = frozenset({"bf16", "fp8_block"})
    elements_per_code: ClassVar[int] = 8
    held_by: ClassVar[frozenset[str]] = frozenset({"q4_0", "q8_0"})
    has_grid: ClassVar[bool] = True
    in_words: ClassVar[str] = (
        f"pack-quantized int4 in groups of {', '.join(map(str, GROUP_SIZES[:-1]))}"
        f" or {GROUP_SIZES[-1]}"
    )

    @classmethod
    def of_options(cls, options: FormatOptions) -> Int4Group:
        return cls(options.group_size)

    @classmethod
    def of_entry(cls, entry: WeightsEntry) -> Int4Group | None:
        size = entry.group_size
        fits = entry.has_numbers(_LAYOUT, kind="int", bits=4, strategy="group")
        return cls(size) if fits and size in GROUP_SIZES else None

    def group(self, *, activations_fp8: bool) -> dict[str, Any]:
        weights = numbers(4, "int", "group") | {"group_size": self.group_size, "actorder": None}
        activations = numbers(8, "float", "token", dynamic=True) if activations_fp8 else None
        return group(_LAYOUT, weights, activations)

    @property
    def k_divisor(self) -> int:
        return self.group_size

    @property
    def k_unit(self) -> str:
        return "the group size"

    def _scale_columns(self, columns: int) -> int:
        return columns // self.group_size

    def grid(self, tensors: Sequence[torch.Tensor]) -> Grid:
        from mtp_kernels.quantize.gptq import Grid

        return Grid.int4(tensors[1].float(), self.group_size)

    def kernel_options(self, scale_rule: str) -> dict[str, Any]:
        return {"group_size": self.group_size, "scale_rule": scale_rule}
