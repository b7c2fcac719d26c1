"""Stored models: every tensor that a folder must hold, from config.json alone, by the weight of the
model that it belongs to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from mtp_export.errors import InvalidInputError
from mtp_export.families import family_of
from mtp_export.families.base import ModelFamily, Role, TensorSpec
from mtp_export.schemes.discrepancies import StoredTensor
from mtp_export.schemes.formats import UNQUANTIZED, EncodedWeight, WeightFormat
from mtp_export.schemes.native import (
    COMPRESSED,
    NativeFp8,
    native_fp8,
    native_scheme,
    quantization_of,
)
from mtp_export.schemes.readings import Reading, reading_of
from mtp_export.schemes.storage import Storage

if TYPE_CHECKING:
    import torch

_WEIGHT = ".weight"
_IN_CHANNELS = {Storage.BF16, Storage.FP8_CHANNEL}
_EXPERTS = ".experts."

Formats = Mapping[str, WeightFormat | None]


class StoredWeight(NamedTuple):
    """A tensor of the model, its format, and the folder's tensors that hold it.

    weight has the released name and, for a matrix, the shape [N, K]. tensors have the folder's
    names and shapes, in the order of the format: codes or values, scale, constants. transposed:
    matrices are stored as [K, N].
    """

    weight: TensorSpec
    format: WeightFormat
    tensors: tuple[StoredTensor, ...]
    transposed: bool = False

    @property
    def storage(self) -> Storage:
        """Storage of the format; BF16 for whatever dtype the model computes in."""
        return self.format.storage

    @property
    def released_names(self) -> tuple[str, ...]:
        """Names of the tensors in the released layout."""
        own = self.tensors[0].name
        module = own.rpartition(".")[0]
        if len(self.tensors) == 1:
            return (self.weight.name,)
        return tuple(
            # an input_scale lies beside the module
            self.weight.module + tensor.name.removeprefix(module)
            if tensor.name.startswith(f"{module}.")
            else tensor.name
            for tensor in self.tensors
        )

    def encoded(self, tensors: Sequence[torch.Tensor]) -> EncodedWeight:
        """Return the weight that the folder's tensors hold, given in the order of `tensors`.

        Raises InvalidInputError for tensors that contradict each other.
        """
        if self.transposed:
            tensors = [one.t().contiguous() if one.dim() == 2 else one for one in tensors]
        codes, *others = tensors
        if not others:
            return EncodedWeight(self.format, codes)
        names = [tensor.name for tensor in self.tensors]
        constants = dict(zip(names[2:], others[1:], strict=True))
        self.format.check_constants(constants, self.weight.shape)
        return EncodedWeight(self.format, codes, others[0])


@dataclass(frozen=True)
class StoredModel:
    """Everything that a folder must hold: the weights of a model by their released names.

    quantization is config.json's quantization_config as it was read; where a folder holds one part
    alone, weights are those of the part.
    """

    family: ModelFamily
    quantization: object
    weights: Mapping[str, StoredWeight]

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Every tensor by its name on disk."""
        return {tensor.name: tensor for one in self.weights.values() for tensor in one.tensors}

    @cached_property
    def weight_of(self) -> Mapping[str, StoredWeight]:
        """Weight that each tensor on disk belongs to."""
        return {tensor.name: one for one in self.weights.values() for tensor in one.tensors}

    @property
    def main(self) -> StoredModel:
        """The main model's part alone."""
        return self._part(lambda one: one.weight.mtp_layer is None)

    @property
    def mtp(self) -> StoredModel:
        """The MTP layers' part alone."""
        return self._part(lambda one: one.weight.mtp_layer is not None)

    @cached_property
    def native(self) -> NativeFp8 | None:
        """Native fp8 format of a released checkpoint; None for another source's.

        Raises UnsupportedError for a quantization that no source has.
        """
        return None if self.in_channels else native_fp8(self.quantization)

    @property
    def scheme(self) -> str | None:
        """Name of the precision scheme that a source is in; None for a precision of no scheme."""
        return None if self.in_channels else native_scheme(self.native)

    @cached_property
    def in_channels(self) -> bool:
        """True for a checkpoint with fp8 channels, and nothing else that is quantized."""
        storages = {one.storage for one in self.weights.values()}
        return Storage.FP8_CHANNEL in storages and storages <= _IN_CHANNELS

    def reread(self, quantization: object, rename: Callable[[str], str]) -> StoredModel:
        """Return what the same weights must be under another quantization_config and other names.

        Raises as stored_model.
        """
        return _stored(self.family, self._specs, quantization=quantization, rename=rename)

    @property
    def _specs(self) -> list[TensorSpec]:
        return [one.weight for one in self.weights.values()]

    def _part(self, wanted: Callable[[StoredWeight], bool]) -> StoredModel:
        return replace(self, weights={n: one for n, one in self.weights.items() if wanted(one)})


def stored_model(config: Mapping[str, Any]) -> StoredModel:
    """Return what a folder in the released layout holds, main and MTP, by its config.json.

    Raises UnsupportedError for a model or quantization that this tool does not know,
    InvalidInputError for a config that contradicts itself or that engines cannot follow.
    """
    family = family_of(config)
    return _stored(family, list(family.tensors.values()), quantization_of(config))


def stored_source(config: Mapping[str, Any]) -> StoredModel:
    """Return what a checkpoint to export or quantize holds: unquantized, native fp8, or fp8 with a
    scale per channel.

    Raises as stored_model, and UnsupportedError for any other quantization.
    """
    family_of(config)
    quantization = quantization_of(config)
    if not isinstance(quantization, dict) or quantization.get("quant_method") != COMPRESSED:
        native_fp8(quantization)
        return stored_model(config)
    stored = stored_model(config)
    if not stored.in_channels:
        native_fp8(quantization)
    return stored


def stored_mtp(
    config: Mapping[str, Any], mtp_name: Callable[[str, int], str], *, transposes: bool
) -> StoredModel:
    """Return what a folder holds that keeps the MTP layers under other names.

    config is the config.json in the released form, its quantization_config in the folder's names.
    mtp_name maps a released tensor name and the MTP layer's index to the folder's name. transposes:
    matrices of linears are stored as [K, N]. Raises as stored_model.
    """
    family = family_of(config)
    layers = {
        spec.name: layer
        for spec in family.tensors.values()
        if (layer := spec.mtp_layer) is not None
    }
    return _stored(
        family,
        specs=[family.tensors[name] for name in layers],
        quantization=quantization_of(config),
        rename=lambda name: mtp_name(name, layers[name]),
        transposes=transposes,
    )


def _stored(
    family: ModelFamily,
    specs: Sequence[TensorSpec],
    quantization: object,
    rename: Callable[[str], str] = str,
    *,
    transposes: bool = False,
) -> StoredModel:
    """Return how tensors of a model lie on disk; the config's patterns match the renamed names."""
    reading = reading_of(quantization)
    formats: dict[str, WeightFormat | None] = {}
    weights: dict[str, StoredWeight] = {}
    for spec in specs:
        name = rename(spec.name)
        found = None
        if name.endswith(_WEIGHT) and len(spec.shape) == 2:
            # Engines read all experts of a layer in the format of the first one.
            module = _of_first_expert(name.removesuffix(_WEIGHT))
            if module not in formats:
                formats[module] = reading.format_of(module, spec.role)
            found = formats[module]
        weights[spec.name] = _stored_weight(spec, name, found or UNQUANTIZED, transposes=transposes)
    _check_experts(formats)
    _check_fused(family, reading, formats)
    return StoredModel(family, quantization, weights)


def _stored_weight(
    spec: TensorSpec, name: str, weight_format: WeightFormat, *, transposes: bool
) -> StoredWeight:
    if weight_format is UNQUANTIZED:
        tensors: tuple[StoredTensor, ...] = (
            StoredTensor(name, spec.shape, spec.dtypes, optional=spec.optional),
        )
    else:
        tensors = _quantized_tensors(spec, name, weight_format)
    # An embedding is a lookup table, not a linear.
    if not transposes or len(spec.shape) != 2 or spec.role is Role.EMBEDDING:
        return StoredWeight(spec, weight_format, tensors)
    turned = tuple(
        tensor._replace(shape=tensor.shape[::-1]) if len(tensor.shape) == 2 else tensor
        for tensor in tensors
    )
    return StoredWeight(spec, weight_format, tensors=turned, transposed=True)


def _of_first_expert(module: str) -> str:
    """Return the name of the first expert's module for that of any expert; others as they are."""
    layer, _, expert_module = module.partition(_EXPERTS)
    number, _, rest = expert_module.partition(".")
    return f"{layer}{_EXPERTS}0.{rest}" if number.isdecimal() and rest else module


def _quantized_tensors(
    spec: TensorSpec, name: str, weight_format: WeightFormat
) -> tuple[StoredTensor, ...]:
    divisor = weight_format.k_divisor
    if spec.shape[1] % divisor:
        raise InvalidInputError(
            f"config.json's quantization_config does not fit {spec.name}",
            expected=f"K divisible by {divisor} under {weight_format.storage}",
            found=f"[N, K] = {list(spec.shape)}",
        )
    parent, dot, linear = name.removesuffix(_WEIGHT).rpartition(".")
    codes, *others = _layout(weight_format, dot + linear, spec.shape)
    first, optional = parent + codes.name, spec.optional
    return (
        StoredTensor(first, codes.shape, codes.dtypes, None, optional),
        *[StoredTensor(parent + t.name, t.shape, t.dtypes, first, optional) for t in others],
    )


@lru_cache(maxsize=1 << 10)
def _layout(
    weight_format: WeightFormat, linear: str, shape: tuple[int, ...]
) -> tuple[StoredTensor, ...]:
    """Return the tensors that hold a weight, by their names behind that of the module around it.

    A model has 46,000 weights, but tens of layouts.
    """
    return tuple(
        StoredTensor(tensor.name, tensor.shape, weight_format.accepted_dtypes(tensor))
        for tensor in weight_format.tensors(f"{linear}{_WEIGHT}", shape)
    )


def _check_fused(family: ModelFamily, reading: Reading, formats: Formats) -> None:
    """Refuse linears that engines load as one matrix and that differ, by any of its names."""
    for module, own in formats.items():
        parent, _, last = module.rpartition(".")
        for parts, fused_names in family.patterns.fused.items():
            others = [f"{parent}.{part}" for part in parts[1:]]
            if last != parts[0] or not formats.keys() >= set(others):
                continue
            for other in others:
                if formats[other] != own:
                    raise _unlike({module: own, other: formats[other]})
            if own is None or _EXPERTS in module:
                continue
            for fused in (f"{parent}.{name}" for name in fused_names):
                if (found := reading.fused_format(fused, own)) != own:
                    raise _unlike({module: own, fused: found})


def _check_experts(formats: Formats) -> None:
    """Refuse projections of an expert that differ: one kernel computes all three."""
    for module, own in formats.items():
        if module.endswith(".experts.0.down_proj"):
            up = module.replace("down_proj", "up_proj")
            if formats[up] != own:
                raise _unlike({module: own, up: formats[up]})


def _unlike(formats: Formats) -> InvalidInputError:
    names, found = " and ".join(formats), " and ".join(map(_words, formats.values()))
    return InvalidInputError(
        f"config.json's quantization_config gives {names} different formats",
        expected="one format: engines load them together",
        found=found,
        todo="Correct its targets and ignore list; patterns must match fused names too",
    )


def _words(weight_format: WeightFormat | None) -> str:
    return "not quantized" if weight_format is None else str(weight_format.storage)
