"""Conversion of one part of a model into a scheme: the step of a plan for every stored tensor."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from mtp_checkpoints.containers.base import TensorInfo
from mtp_checkpoints.dtypes import DType, OutputTensor
from mtp_checkpoints.errors import UnsupportedError
from mtp_checkpoints.families.base import weight_name
from mtp_checkpoints.formats import (
    FORMATS,
    Fp8Block,
    Fp8Channel,
    Unquantized,
    WeightFormat,
    has_groups,
)
from mtp_checkpoints.formats.base import GROUP_SIZES, NATIVE_SCALE
from mtp_checkpoints.formats.nvfp4 import NvFp4Format
from mtp_checkpoints.quantization.method import PartStorage
from mtp_checkpoints.quantization.stored import StoredWeight
from mtp_export.plan import Step, copy_step
from mtp_export.schemes.carried import Carry, CarryToBlocks
from mtp_export.schemes.scheme import every_linear
from mtp_export.schemes.transforms import Convert, Transpose

_CONVERTIBLE = (DType.F8_E4M3, DType.BF16, DType.F16, DType.F32)


@dataclass(frozen=True, kw_only=True)
class Conversion(PartStorage):
    """Conversion of the linears of one part into their storages.

    scheme is None where tensors stay as stored. scale_rule chooses the scales of groups. joined are
    the last name components of linears that engines join, set by set: where a format has a number
    of the whole matrix, they share it.
    """

    scheme: str | None = None
    scale_rule: str = "minmax"
    joined: tuple[tuple[str, ...], ...] = ()

    @property
    def keeps_all(self) -> bool:
        """True where every tensor stays as stored."""
        return self.scheme is None and not self.storages

    def step(
        self,
        one: StoredWeight,
        tensor: TensorInfo,
        tensors: Mapping[str, TensorInfo],
        name: str,
    ) -> Step | None:
        """Return the step that writes a tensor of a source's weight under a (target's) name.

        tensors are all of the source, by name. None for a scale that the step of its weight reads.
        Raises UnsupportedError naming the tensor when its dtype or shape does not allow the
        storage.
        """
        if self.keeps_all:
            return copy_step(tensor, name)
        storage, is_scale = self.storage_of(one.weight), tensor.name != one.tensors[0].name
        if storage is None and self.scheme is not None and one.storage == Fp8Channel.storage:
            # Such as eh_proj: no config.json that is written describes it.
            storage = Unquantized.storage
        if one.format.held_by and (storage is None or storage not in one.format.held_by):
            raise _not_held(one, storage, tensor)
        stays = storage in (None, one.storage)
        if is_scale and not stays:
            return None
        if is_scale and one.storage == Fp8Block.storage:
            return copy_step(tensor, name.removesuffix(NATIVE_SCALE) + self.options.fp8_scale_name)
        if stays:
            return copy_step(tensor, name)
        assert storage is not None, "it stays otherwise"
        wanted = FORMATS[storage].of_options(self.options)
        if isinstance(wanted, NvFp4Format) and isinstance(one.format, NvFp4Format):
            return self._carried(one, wanted, tensors, name)
        if wanted.storage in one.format.held_by:
            return self._in_blocks(one, wanted, tensors, name)
        rows, chunks = one.weight.shape[0], one.weight.row_chunks
        converted = wanted.for_columns(tensor.shape[-1]).in_chunks(rows, chunks)
        _check(tensor, converted)
        own = [stored.name for stored in one.tensors if stored.name in tensors]
        joined = self._joined_with(one, tensors) if converted.of_whole_matrix else []
        suffixes = [name.removeprefix(one.weight.module) for name in own]
        inputs = (*own, *(module + suffix for module in joined for suffix in suffixes))
        outputs = converted.tensors(name, tensor.shape)
        convert = Convert(converted, self.scale_rule, one.format, joined=len(joined))
        return Step(convert, inputs, outputs, scheme=self.scheme)

    def _carried(
        self, one: StoredWeight, wanted: NvFp4Format, tensors: Collection[str], name: str
    ) -> Step:
        """Return the step that writes a weight in nvfp4 in another layout, its numbers the same."""
        own = [stored.name for stored in one.tensors if stored.name in tensors]
        module = name.removesuffix(own[0].removeprefix(one.weight.module))
        outputs = wanted.tensors(weight_name(module), one.weight.shape)
        assert isinstance(one.format, NvFp4Format), "as the caller asks"
        carry = Carry(inverted=wanted.divides != one.format.divides)
        return Step(carry, tuple(own[: len(outputs)]), outputs, scheme=self.scheme)

    def _in_blocks(
        self, one: StoredWeight, wanted: WeightFormat, tensors: Mapping[str, TensorInfo], name: str
    ) -> Step:
        """Return the step that writes a weight's codes as blocks of a GGUF file, its numbers the
        same."""
        codes, scale, *_ = (tensors[stored.name] for stored in one.tensors)
        released = weight_name(name.removesuffix(codes.name.removeprefix(one.weight.module)))
        _check_columns(codes, wanted, one.weight.shape)
        outputs = wanted.tensors(released, one.weight.shape)
        carry = CarryToBlocks(wanted, one.format)
        return Step(carry, (codes.name, scale.name), outputs, scheme=self.scheme)

    def _joined_with(self, one: StoredWeight, tensors: Collection[str]) -> list[str]:
        """Return the other modules that engines join with a weight's, as far as they are there."""
        parent, _, last = one.weight.module.rpartition(".")
        others = (part for parts in self.joined if last in parts for part in parts if part != last)
        modules = (f"{parent}.{part}" for part in others)
        return [module for module in modules if f"{module}.weight" in tensors]


AS_STORED = Conversion(storages={})
DEQUANTIZED = Conversion(storages=every_linear(Unquantized.storage))


def transpose_step(tensor: TensorInfo, name: str) -> Step:
    """Return the step that writes a matrix [n, k] as [k, n], its elements unchanged."""
    n, k = tensor.shape
    return Step(Transpose(), (tensor.name,), (OutputTensor(name, tensor.dtype, (k, n)),))


def _check(weight: TensorInfo, target: WeightFormat) -> None:
    if weight.dtype not in _CONVERTIBLE:
        raise UnsupportedError(
            f"Tensor {weight.name} cannot become {target.storage}",
            where=weight.path,
            expected=f"dtype {' or '.join(_CONVERTIBLE)}",
            found=weight.dtype,
            todo="Start from the original release",
        )
    _check_columns(weight, target, weight.shape)


def _check_columns(weight: TensorInfo, target: WeightFormat, shape: tuple[int, ...]) -> None:
    """Refuse columns of a weight [N, K] that a format cannot divide."""
    if shape[1] % target.k_divisor:
        raise UnsupportedError(
            f"Tensor {weight.name} cannot become {target.storage}",
            where=weight.path,
            expected=f"K divisible by {target.k_divisor}, {target.k_unit}",
            found=f"[N, K] = {list(shape)}",
            todo=_fit(shape[1], target),
        )


def _not_held(one: StoredWeight, storage: str | None, tensor: TensorInfo) -> UnsupportedError:
    """Return the error of codes that what is written of them would not hold as they are."""
    return UnsupportedError(
        f"Tensor {tensor.name} is in {one.storage}, whose codes are carried as they are alone",
        where=tensor.path,
        expected=f"a precision of {' or '.join(sorted(one.format.held_by))} for it",
        found=storage or "a precision that leaves it as it is",
        todo="Start from the original checkpoint",
    )


def _fit(columns: int, target: WeightFormat) -> str:
    """Return what to do about columns that a format cannot divide: the group sizes that can."""
    known = reversed(GROUP_SIZES) if has_groups([target.storage]) else ()
    sizes = [size for size in known if columns % size == 0]
    others = f" (or {', '.join(map(str, sizes[1:]))})" if sizes[1:] else ""
    advice = f"Pass --group-size {sizes[0]}{others}" if sizes else "Choose another scheme"
    return f"Nothing was written. {advice}"
