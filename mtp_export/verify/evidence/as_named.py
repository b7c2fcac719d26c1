"""Checkpoints in a quantization that is not read here as their names alone tell them: as if they
were unquantized. A tool's own names for a part of the main layers are none of a loss."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from mtp_checkpoints.containers.base import TensorInfo
from mtp_checkpoints.errors import MtpExportError, UnsupportedError
from mtp_checkpoints.families.base import FLOATS, TensorSpec
from mtp_checkpoints.families.signs import in_layer
from mtp_checkpoints.families.stored_names import as_any_expert, last_of
from mtp_checkpoints.quantization.methods import check_decoded, quant_config_of
from mtp_checkpoints.quantization.native import Config, quantization_of, with_quantization
from mtp_checkpoints.quantization.stored import StoredModel, stored_model
from mtp_checkpoints.tensors.reader import Checkpoint

_WEIGHT = ".weight"
_KNOWN = 0.5  # of the kinds of main weights: of fewer, the tool has names of its own
_Signature = frozenset[tuple[object, ...]]


def as_named(checkpoint: Checkpoint) -> Checkpoint | None:
    """Return a whole checkpoint of a known family as if it were unquantized: each matrix is there
    of whose module any tensor is, unless its codes alone are lost. None where its quantization
    is read, or its model is not known, or names most of its weights otherwise."""
    if not _is_unread(checkpoint.config):
        return None
    config = with_quantization(checkpoint.config, None)
    try:
        stored = stored_model(config, checkpoint.tensors)
    except MtpExportError:  # config_match says why
        return None
    named = _Named(stored, checkpoint.tensors)
    return named.of(checkpoint, config) if named.is_known else None


def _is_unread(config: Config) -> bool:
    try:
        quant_config_of(quantization_of(config))
        check_decoded(config)
    except UnsupportedError:
        return True
    except MtpExportError:  # a field of it is unusable: config_match says which
        return False
    return False


@dataclass(frozen=True)
class _Named:
    """A model as it would be unquantized, and the tensors of a checkpoint of it."""

    stored: StoredModel
    tensors: Mapping[str, TensorInfo]

    @cached_property
    def wanted(self) -> Mapping[str, TensorSpec]:
        return {spec.name: spec for spec in self.stored.specs}

    @cached_property
    def parts(self) -> Mapping[str, Sequence[str]]:
        """Tensors by the matrix that they are parts of; none of one whose codes are lost."""
        return {name: own for name, own in self._beside.items() if not self._lacks_codes(name)}

    def _lacks_codes(self, name: str) -> bool:
        """Return whether a matrix has others of the parts that its like in main layers has, and not
        the largest."""
        ends, like = self._ends(name), self._main_ends.get(_kind(name), {})
        return ends < like.keys() and max(like, key=like.__getitem__) not in ends

    def _ends(self, name: str) -> set[str]:
        return {one.removeprefix(name.removesuffix(_WEIGHT)) for one in self._beside[name]}

    @cached_property
    def _main_ends(self) -> Mapping[str, Mapping[str, int]]:
        """Sizes of the parts of main layers' matrices, by the ends of their names, of each kind."""
        found: dict[str, dict[str, int]] = defaultdict(dict)
        for name, own in self._beside.items():
            if not self._is_of_mtp(name):
                module = name.removesuffix(_WEIGHT)
                sizes = {one.removeprefix(module): self.tensors[one].size_bytes for one in own}
                found[_kind(name)] |= sizes
        return found

    @cached_property
    def _beside(self) -> Mapping[str, Sequence[str]]:
        """Tensors by the matrix of whose module they are, or below."""
        modules = {
            name.removesuffix(_WEIGHT): name for name in filter(self._is_matrix, self.wanted)
        }
        found: dict[str, list[str]] = defaultdict(list)
        for name, tensor in self.tensors.items():
            module = name.rpartition(".")[0]
            whole = modules.get(module) or modules.get(module.rpartition(".")[0])
            if name in self.wanted:
                whole = name if whole and tensor.dtype not in FLOATS else None
            if whole is not None:
                found[whole].append(name)
        return found

    def _is_matrix(self, name: str) -> bool:
        return name.endswith(_WEIGHT) and len(self.wanted[name].shape) == 2

    def _is_there(self, name: str) -> bool:
        return name in self.tensors or name in self.parts

    @cached_property
    def named_otherwise(self) -> Collection[str]:
        """Kinds of weights of which no main layer has any by its name."""
        return {kind for kind, is_there in self._kinds.items() if not is_there}

    @cached_property
    def _kinds(self) -> Mapping[str, bool]:
        found = dict[str, bool]()
        for spec in self.stored.main.specs:
            kind = _kind(spec.name)
            if not spec.optional:
                found[kind] = found.get(kind, False) or self._is_there(spec.name)
        return found

    @property
    def is_known(self) -> bool:
        there = sum(self._kinds.values())
        return there > _KNOWN * len(self._kinds)

    def of(self, checkpoint: Checkpoint, config: Config) -> Checkpoint:
        """Return the checkpoint as if it were unquantized."""
        made = {tensor.name: tensor for tensor in self._unquantized()}
        first, *others = (
            replace(
                shard,
                tensors=tuple(made.pop(one.name) for one in shard.tensors if one.name in made),
            )
            for shard in checkpoint.shards
        )
        first = replace(first, tensors=(*first.tensors, *made.values()))
        return replace(checkpoint, config=config, shards=(first, *others))

    def _unquantized(self) -> Iterator[TensorInfo]:
        taken = {part for own in self._beside.values() for part in own}
        for name, own in self.parts.items():
            yield self._made(name, self.wanted[name].shape, own[0])
        some = next(iter(self.tensors))
        for spec in self.stored.specs:
            if not self._is_there(spec.name) and _kind(spec.name) in self.named_otherwise:
                yield self._made(spec.name, spec.shape, some)
        yield from self._others(name for name in self.tensors if name not in taken)

    def _others(self, names: Iterable[str]) -> Iterator[TensorInfo]:
        """Yield what is stored as it is, and modules of other names whose tensors are as those of a
        known one, as the matrix that they are."""
        shapes: dict[_Signature, set[tuple[int, ...]]] = defaultdict(set)
        for name, own in self.parts.items():
            for signature in self._signatures(name.removesuffix(_WEIGHT), own):
                shapes[signature].add(self.wanted[name].shape)
        lasts = {last for name in self.wanted if (last := last_of(name)) != "weight"}  # as a bias
        modules: dict[str, list[str]] = defaultdict(list)
        for name in names:
            if name in self.wanted or last_of(name) in lasts:
                yield self.tensors[name]
            else:
                modules[name.rpartition(".")[0]].append(name)
        main = {_kind(n) for own in modules.values() for n in own if not self._is_of_mtp(n)}
        for module, own in modules.items():
            known = (shapes.get(signature, ()) for signature in self._signatures(module, own))
            shape = next((only for one in known if len(one) == 1 for only in one), None)
            if shape is not None:
                yield self._made(f"{module}{_WEIGHT}", shape, own[0])
            else:
                lone = (n for n in own if not (self._is_of_mtp(n) and _kind(n) in main))
                yield from map(self.tensors.__getitem__, lone)

    def _is_of_mtp(self, name: str) -> bool:
        return any(name.startswith(f"{module.name}.") for module in self.stored.family.mtp)

    def _signatures(self, module: str, names: Sequence[str]) -> Iterator[_Signature]:
        """Yield the ends of the names, dtypes and shapes of a module's tensors, first those of
        modules of the same last name."""
        for last in (last_of(module), ""):
            ends = ((one.removeprefix(module), *self.tensors[one][1:3]) for one in names)
            yield frozenset((last, *end) for end in ends)

    def _made(self, name: str, shape: tuple[int, ...], like: str) -> TensorInfo:
        dtype = self.wanted[name].dtypes[0] if name in self.wanted else FLOATS[0]
        return self.tensors[like]._replace(name=name, shape=shape, dtype=dtype)


def _kind(name: str) -> str:
    """Return what a tensor is in its layer, whatever its expert."""
    return as_any_expert(in_layer(name)[1])
