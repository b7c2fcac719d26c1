"""Stored models: every tensor that a folder must hold, from config.json alone, by the weight of the
model that it belongs to."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, repeat
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.families import family_of
from mtp_checkpoints.families.base import Role, TensorSpec
from mtp_checkpoints.families.spec import ModelSpec
from mtp_checkpoints.formats import (
    FORMATS,
    UNQUANTIZED,
    EncodedWeight,
    Fp8Block,
    Unquantized,
    WeightFormat,
)
from mtp_checkpoints.named_tuples import rows_of
from mtp_checkpoints.quantization.fusion_rules import EXPERTS, check_fusion_rules, split_at_expert
from mtp_checkpoints.quantization.method import QuantConfig, with_quantized_linears
from mtp_checkpoints.quantization.methods import METHODS, check_decoded, quant_config_of
from mtp_checkpoints.quantization.mismatches import HasLayout, Mismatch, StoredTensor, compare
from mtp_checkpoints.quantization.native import (
    COMPRESSED,
    NativeFp8,
    method_of,
    native_fp8,
    native_scheme,
    quantization_of,
)

if TYPE_CHECKING:
    import torch

_WEIGHT = ".weight"
_OF_NO_SCHEME = {own for one in FORMATS.values() if one.of_no_scheme for own in one.methods}
_TABLES = (Role.EMBEDDING, Role.HEAD)
_layout_of = attrgetter("dtype", "shape")


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
    def storage(self) -> str:
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
        names = [tensor.name for tensor in self.tensors]
        constants = dict(zip(names[2:], tensors[2:], strict=True))
        self.format.check_constants(constants, self.weight.shape)
        return self.format.encoded(tensors)


class WeightKind(NamedTuple):
    """Weights that differ in the number of their expert alone, and their format: a model has
    46,000 weights, but some hundred kinds of them.

    tensors are those that hold one weight, as StoredWeight has them, by the end of their names that
    is behind the name of the expert. experts are these names, empty for a weight of none.
    """

    format: WeightFormat
    tensors: tuple[StoredTensor, ...]
    transposed: bool
    specs: list[TensorSpec]
    experts: list[str]

    @property
    def names(self) -> Iterator[list[str]]:
        """Names of all weights' tensors, by their place in a weight."""
        return ([expert + tensor.name for expert in self.experts] for tensor in self.tensors)

    def weights(self) -> Iterator[StoredWeight]:
        """Yield the weights."""
        names = [*self.names]
        scaled: list[Iterable[str | None]] = [repeat(None), *repeat(names[0], len(names) - 1)]
        tensors = (
            rows_of(
                StoredTensor,
                name=own,
                shape=repeat(tensor.shape),
                dtypes=repeat(tensor.dtypes),
                scale_of=of,
                optional=repeat(tensor.optional),
            )
            for own, of, tensor in zip(names, scaled, self.tensors, strict=True)
        )
        return rows_of(
            StoredWeight,
            weight=self.specs,
            format=repeat(self.format),
            tensors=zip(*tensors, strict=True),
            transposed=repeat(self.transposed),
        )


@dataclass(frozen=True)
class StoredModel:
    """Everything that a folder must hold: the weights of a model, and of those that are alike what
    they have in common.

    quantization is config.json's quantization_config as it was read; where a folder holds one part
    alone, specs and kinds are those of the part.
    """

    family: ModelSpec
    quantization: object
    specs: Sequence[TensorSpec]
    kinds: Sequence[WeightKind]

    @cached_property
    def weights(self) -> Mapping[str, StoredWeight]:
        """Every weight by its released name."""
        made = {weight.weight.name: weight for kind in self.kinds for weight in kind.weights()}
        return {spec.name: made[spec.name] for spec in self.specs}

    @cached_property
    def tables(self) -> Mapping[str, StoredWeight]:
        """Embeddings and heads by their released names."""
        tables = (kind for kind in self.kinds if kind.specs[0].role in _TABLES)
        return {table.weight.name: table for kind in tables for table in kind.weights()}

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Every tensor by its name on disk."""
        return {tensor.name: tensor for one in self.weights.values() for tensor in one.tensors}

    @property
    def names(self) -> Iterator[str]:
        """Names of all tensors on disk."""
        return chain.from_iterable(names for kind in self.kinds for names in kind.names)

    @cached_property
    def weight_of(self) -> Mapping[str, StoredWeight]:
        """Weight that each tensor on disk belongs to."""
        return {tensor.name: one for one in self.weights.values() for tensor in one.tensors}

    @property
    def main(self) -> StoredModel:
        """The main model's part alone."""
        return self.of_parts(main=True, mtp=False)

    @cached_property
    def mtp(self) -> StoredModel:
        """The MTP layers' part alone."""
        return self.of_parts(main=False, mtp=True)

    def of_parts(self, *, main: bool, mtp: bool) -> StoredModel:
        """Return what a folder must hold that holds these parts."""
        return self.of_tensors(lambda spec: main if spec.mtp_layer is None else mtp)

    def of_tensors(self, is_there: Callable[[TensorSpec], bool]) -> StoredModel:
        """Return what a folder must hold of some tensors, all or none of a kind."""
        specs = [spec for spec in self.specs if is_there(spec)]
        return replace(self, specs=specs, kinds=[k for k in self.kinds if is_there(k.specs[0])])

    @cached_property
    def native(self) -> NativeFp8 | None:
        """Native fp8 format of a released checkpoint; None for another source's.

        Raises UnsupportedError for a quantization that no source has.
        """
        return None if self.unkept else native_fp8(self.quantization)

    @property
    def scheme(self) -> str | None:
        """Name of the precision scheme that a source is in; None for a precision of no scheme."""
        return None if self.unkept else native_scheme(self.native)

    @cached_property
    def unkept(self) -> str | None:
        """Storages of all that is quantized in a source where no scheme keeps it; else None."""
        formats = {kind.format.storage: kind.format for kind in self.kinds}
        formats.pop(Unquantized.storage, None)
        is_alone = len(formats) == 1
        # Of fp8 in blocks schemes keep the native ones alone.
        renamed = is_alone and method_of(self.quantization) == COMPRESSED
        unkept = all(
            one.held_by or is_alone and one.of_no_scheme or renamed and isinstance(one, Fp8Block)
            for one in formats.values()
        )
        return " and ".join(formats) or None if unkept else None

    def reread(self, quantization: object, rename: Callable[[str], str]) -> StoredModel:
        """Return what the same weights must be under another quantization_config and other names,
        experts by the name that engines ask for. Raises as stored_model."""
        method = METHODS.get(method_of(quantization))  # of a damaged config it may be anything
        as_one = method is not None and method.experts_as_one
        return _stored(self.family, self.specs, quantization, rename, experts_as_one=as_one)

    def with_mtp_of(self, other: StoredModel, quantization: object) -> StoredModel:
        """Return the main model's part beside the MTP layers of another checkpoint."""
        main, mtp = self.main, other.mtp
        family = replace(self.family, mtp=other.family.mtp)
        specs, kinds = [*main.specs, *mtp.specs], [*main.kinds, *mtp.kinds]
        return StoredModel(family, quantization, specs=specs, kinds=kinds)

    def differences(self, tensors: Mapping[str, HasLayout]) -> list[Mismatch]:
        """Return every difference between a folder's tensors and those that it must hold, in a
        stable order; none for tensors that are carried."""
        tensors = self.family.without_carried(tensors)
        return [] if self._are_in(tensors) else compare(tensors, self.tensors.values())

    def _are_in(self, tensors: Mapping[str, HasLayout]) -> bool:
        """Return whether a folder holds every tensor as it must be, and no other: looking at those
        that are alike together takes a fraction of finding each difference."""
        held = 0
        for kind in self.kinds:
            names = [*kind.names]
            if kind.tensors[0].optional and tensors.keys().isdisjoint(chain(*names)):
                continue
            for own, (_, shape, dtypes, *_) in zip(names, kind.tensors, strict=True):
                try:
                    found = set(map(_layout_of, map(tensors.__getitem__, own)))
                except KeyError:
                    return False
                if not found <= {(dtype, shape) for dtype in dtypes}:
                    return False
                held += len(own)
        return held == len(tensors)


def stored_model(config: Mapping[str, Any], names: Collection[str] = ()) -> StoredModel:
    """Return what a folder in the released layout holds, main and MTP, by its config.json.

    names as for family_of. Raises UnsupportedError for a model or quantization that this tool does
    not know, InvalidInputError for a config that contradicts itself or that engines cannot follow.
    """
    family = family_of(config, names)
    check_decoded(config)
    return _stored(family, with_quantized_linears(family, names), quantization_of(config))


def stored_source(config: Mapping[str, Any], names: Collection[str] = ()) -> StoredModel:
    """Return what a checkpoint to export or quantize holds: unquantized, native fp8, fp8 with a
    scale per channel or block, or codes that are carried: nvfp4, and what blocks of GGUF files
    hold. names and errors as of stored_model; UnsupportedError for any other quantization too.
    """
    family_of(config)
    quantization = quantization_of(config)
    if method_of(quantization) in _OF_NO_SCHEME:
        stored = stored_model(config, names)
        if stored.unkept:
            return stored
    native_fp8(quantization)
    return stored_model(config, names)


def stored_mtp(
    config: Mapping[str, Any],
    mtp_name: Callable[[str, int], str],
    names: Collection[str] = (),
    *,
    transposes: bool,
) -> StoredModel:
    """Return what a folder holds that keeps the MTP layers under other names.

    config is the config.json in the released form, its quantization_config in the folder's names.
    mtp_name maps a released tensor name and the MTP layer's index to the folder's name. transposes:
    matrices of linears are stored as [K, N]. names and errors as of stored_model.
    """
    family = family_of(config, names)
    specs = with_quantized_linears(family, names, of_mtp=True)
    layers = {spec.name: layer for spec in specs if (layer := spec.mtp_layer) is not None}
    return _stored(
        family,
        specs,
        quantization=quantization_of(config),
        rename=lambda name: mtp_name(name, layers[name]),
        transposes=transposes,
    )


def _stored(
    family: ModelSpec,
    specs: Sequence[TensorSpec],
    quantization: object,
    rename: Callable[[str], str] = str,
    *,
    transposes: bool = False,
    experts_as_one: bool = False,
) -> StoredModel:
    """Return how tensors of a model lie on disk; the config's patterns match the renamed names, and
    with experts_as_one the name of a layer's experts."""
    config = quant_config_of(quantization)
    formats: dict[str, WeightFormat | None] = {}
    kinds: dict[tuple[object, ...], WeightKind] = {}
    for spec in specs:
        layer, expert, tail = split_at_expert(rename(spec.name))
        key = layer, tail, spec[1:]
        kind = kinds.get(key)
        if kind is None:
            # Engines read all experts of a layer in the format of the first one.
            first = f"{layer}{EXPERTS}0{tail}" if expert else tail
            if expert and experts_as_one:
                first = f"{layer}{EXPERTS.rstrip('.')}{_WEIGHT}"
            stored_as = _format_of(config, first, spec, formats) or UNQUANTIZED
            kind = kinds[key] = _kind_of(spec, tail, stored_as, transposes=transposes)
        kind.specs.append(spec)
        kind.experts.append(expert)
    if config.loads_together:
        check_fusion_rules(family, config, formats)
    return StoredModel(family, quantization, specs, [*kinds.values()])


def _format_of(
    config: QuantConfig, name: str, spec: TensorSpec, formats: dict[str, WeightFormat | None]
) -> WeightFormat | None:
    """Return the format of a tensor by its name, noted by its module's; None for no matrix."""
    if not name.endswith(_WEIGHT) or len(spec.shape) != 2:
        return None
    module = name.removesuffix(_WEIGHT)
    known = config.format_of(module, spec.role)
    if known is not None and spec.role is Role.HEAD and spec.mtp_layer is None:
        known = known if module.endswith("lm_head") else config.format_of("lm_head", spec.role)
    return formats.setdefault(module, known and known.in_chunks(spec.shape[0], spec.row_chunks))


def _kind_of(
    spec: TensorSpec, name: str, weight_format: WeightFormat, *, transposes: bool
) -> WeightKind:
    """Return the kind of a weight, still empty; name is its name on disk, or the end of that."""
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
    return WeightKind(weight_format, tensors, transposed, specs=[], experts=[])


def _check_columns(spec: TensorSpec, weight_format: WeightFormat) -> None:
    """Refuse a matrix whose rows a format cannot hold (InvalidInputError)."""
    divisor = weight_format.k_divisor
    if spec.shape[1] % divisor:
        raise InvalidInputError(
            f"config.json's quantization does not fit {spec.name}",
            expected=f"K divisible by {divisor} under {weight_format.storage}",
            found=f"[N, K] = {list(spec.shape)}, which no list of it leaves out",
            todo="Where this matrix is stored unquantized, have that leave it out",
        )
