"""What a precision scheme is, and what it does to one part of a model: data, no code that runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from mtp_export.checkpoint.header import TensorInfo
from mtp_export.checkpoint.plan import Step
from mtp_export.errors import UsageError
from mtp_export.families.base import LINEAR_ROLES, BlockFp8, Role, TensorSpec
from mtp_export.schemes.storage import (
    NATIVE_SCALE,
    Storage,
    convert_step,
    keep_step,
    stays,
)


@dataclass(frozen=True)
class Scheme:
    """A precision scheme: the form of every role's linears.

    variants are the same scheme under another option (an int4 scope, an on-disk format).
    int4_activations_fp8: the int4 experts run with activations in fp8.
    on_disk is for people.
    """

    name: str
    on_disk: str
    storages: Mapping[Role, Storage]
    variants: Mapping[str, Mapping[Role, Storage]] = field(default_factory=dict)
    int4_activations_fp8: bool = False

    def variant(self, option: str, value: str) -> Scheme:
        """This scheme under another value of an option (UsageError when it has no such variant)."""
        if value not in self.variants:
            raise UsageError(
                f"{option} {value} does not apply to {self.name}", todo=f"Leave {option} out"
            )
        return replace(self, storages=self.variants[value])


def every_linear(storage: Storage) -> dict[Role, Storage]:
    """One form for all linears."""
    return dict.fromkeys(LINEAR_ROLES, storage)


@dataclass(frozen=True)
class Conversion:
    """What becomes of the linears of one part.

    scheme is None where tensors stay as stored. fp8_scale_name is the last component of an fp8
    weight's scale. bf16_modules are linears (last component) that are bf16 where others are fp8.
    source is an fp8 source's format: what its release left out of fp8 stays as stored.
    """

    scheme: str | None
    storages: Mapping[Role, Storage]
    group_size: int = 128
    fp8_scale_name: str = NATIVE_SCALE
    bf16_modules: tuple[str, ...] = ()
    int4_activations_fp8: bool = False
    source: BlockFp8 | None = None

    def storage_of(self, spec: TensorSpec) -> Storage | None:
        """The form of a weight, None for one that stays as stored whatever that is."""
        storage = self.storages.get(spec.role)
        if storage is None or not spec.is_linear_weight:
            return None
        if self.source is not None and not self.source.covers(spec.module):
            return None
        if storage is Storage.FP8_BLOCK and spec.module.rpartition(".")[2] in self.bf16_modules:
            return Storage.BF16
        return storage

    def weight_step(
        self, spec: TensorSpec, weight: TensorInfo, scale: TensorInfo | None, name: str
    ) -> Step:
        """How a tensor that is no scale gets into the output under a name."""
        storage = self.storage_of(spec)
        if storage is None or stays(weight.dtype, storage):
            return keep_step(weight, name)
        step = convert_step(weight, scale, storage, self.group_size, self.fp8_scale_name, name)
        return replace(step, scheme=self.scheme)

    def scale_step(self, spec: TensorSpec, scale: TensorInfo, name: str) -> Step | None:
        """How the scale of an fp8 weight (its spec) gets there; None when the weight's step
        takes it in."""
        if self.storage_of(spec) not in (None, Storage.FP8_BLOCK):
            return None
        return keep_step(scale, name.removesuffix(NATIVE_SCALE) + self.fp8_scale_name)


AS_STORED = Conversion(None, {})
DEQUANTIZED = Conversion(None, every_linear(Storage.BF16))
