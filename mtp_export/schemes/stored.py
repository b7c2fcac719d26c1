"""Stored models: every tensor that a folder must hold, from config.json alone, by the weight of the
model that it belongs to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from mtp_export.errors import InvalidInputError
from mtp_export.families import family_of
from mtp_export.families.base import ModelFamily, Role, TensorSpec
from mtp_export.named_tuples import row_of
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
        if len(tensors) == 1:
            return EncodedWeight(self.format, tensors[0])
        names = [tensor.name for tensor in self.tensors]
        constants = dict(zip(names[2:], tensors[2:], strict=True))
        self.format.check_constants(constants, self.weight.shape)
        return self.format.encoded(tensors)


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
        return {tensor.name: tensor for tensor in self.promised}

    @property
    def promised(self) -> Iterator[StoredTensor]:
        """Every tensor."""
        return chain.from_iterable(one.tensors for one in self.weights.values())

    @cached_property
    def weight_of(self) -> Mapping[str, StoredWeight]:
        """Weight that each tensor on disk belongs to."""
        return {tensor.name: one for one in self.weights.values() for tensor in one.tensors}

    @property
    def main(self) -> StoredModel:
        """The main model's part alone."""
        return self._part(lambda one: one.weight.mtp_layer is None)

    @cached_property
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
    layouts: dict[tuple[object, ...], _Layout] = {}
    weights: dict[str, StoredWeight] = {}
    for spec in specs:
        layer, expert, tail = _split_at_expert(rename(spec.name))
        alike = layer, tail, spec[1:]
        layout = layouts.get(alike)
        if layout is None:
            # Engines read all experts of a layer in the format of the first one.
            first = f"{layer}{_EXPERTS}0{tail}" if expert else tail
            own = _format_of(reading, first, spec, formats) or UNQUANTIZED
            layout = layouts[alike] = _layout(spec, tail, own, transposes=transposes)
        weights[spec.name] = layout.weight(spec, expert)
    _check_experts(formats)
    _check_fused(family, reading, formats)
    return StoredModel(family, quantization, weights)


def _split_at_expert(name: str) -> tuple[str, str, str]:
    """Return the name of a layer with experts, that of one of them, and what is behind it; for
    another tensor its name as what is behind."""
    layer, _, expert_name = name.partition(_EXPERTS)
    number, _, rest = expert_name.partition(".")
    if not (rest and number.isdecimal()):
        return "", "", name
    return layer, f"{layer}{_EXPERTS}{number}", f".{rest}"


def _format_of(
    reading: Reading, name: str, spec: TensorSpec, formats: dict[str, WeightFormat | None]
) -> WeightFormat | None:
    """Return the format of a tensor by its name, noted by its module's; None for no matrix."""
    if not name.endswith(_WEIGHT) or len(spec.shape) != 2:
        return None
    module = name.removesuffix(_WEIGHT)
    formats[module] = reading.format_of(module, spec.role)
    return formats[module]


class _Layout(NamedTuple):
    """Format and tensors of weights that differ in the number of their expert alone: a model has
    46,000 weights, but some hundred layouts. Names of tensors are those behind the expert's."""

    format: WeightFormat
    tensors: tuple[StoredTensor, ...]
    transposed: bool

    def weight(self, spec: TensorSpec, expert: str) -> StoredWeight:
        """Return a weight of an expert, or of none."""
        (tail, shape, dtypes, _, optional), *others = self.tensors
        name = expert + tail
        codes = row_of(StoredTensor, (name, shape, dtypes, None, optional))
        if not others:
            return row_of(StoredWeight, (spec, self.format, (codes,), self.transposed))
        tensors = [
            row_of(StoredTensor, (expert + tail, shape, dtypes, name, optional))
            for tail, shape, dtypes, _, _ in others
        ]
        return row_of(StoredWeight, (spec, self.format, (codes, *tensors), self.transposed))


def _layout(
    spec: TensorSpec, name: str, weight_format: WeightFormat, *, transposes: bool
) -> _Layout:
    """Return the layout of a weight by its name on disk, or the end of that."""
    tensors: tuple[StoredTensor, ...] = (
        StoredTensor(name, spec.shape, spec.dtypes, optional=spec.optional),
    )
    if weight_format is not UNQUANTIZED:
        _check_columns(spec, weight_format)
        tensors = tuple(
            StoredTensor(
                tensor.name,
                tensor.shape,
                weight_format.accepted_dtypes(tensor),
                optional=spec.optional,
            )
            for tensor in weight_format.tensors(name, spec.shape)
        )
    # An embedding is a lookup table, not a linear.
    transposed = transposes and len(spec.shape) == 2 and spec.role is not Role.EMBEDDING
    if transposed:
        tensors = tuple(
            tensor._replace(shape=tensor.shape[::-1]) if len(tensor.shape) == 2 else tensor
            for tensor in tensors
        )
    return _Layout(weight_format, tensors, transposed)


def _check_columns(spec: TensorSpec, weight_format: WeightFormat) -> None:
    """Refuse a matrix whose rows a format cannot hold (InvalidInputError)."""
    divisor = weight_format.k_divisor
    if spec.shape[1] % divisor:
        raise InvalidInputError(
            f"config.json's quantization_config does not fit {spec.name}",
            expected=f"K divisible by {divisor} under {weight_format.storage}",
            found=f"[N, K] = {list(spec.shape)}",
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
