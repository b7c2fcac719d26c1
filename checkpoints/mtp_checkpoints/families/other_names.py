"""Tensors of a module that are there under names that engines do not look for, and parts of another
model's layer in their place. A matrix that a format packs is known by its bits per element."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

from mtp_checkpoints.dtypes import DType
from mtp_checkpoints.families.base import FLOATS

_FEWEST = 2  # modules by which a part of a layer is known as another's
_CODES = ("weight_packed", "qweight")
_BITS = (2, 3, 4, 5, 6, 8)  # of a code


class Stored(Protocol):
    """A stored tensor, as far as telling it by its shape needs it."""

    @property
    def dtype(self) -> DType: ...

    @property
    def shape(self) -> Sequence[int]: ...


class Wanted(Protocol):
    """A weight that engines look for, unless it is optional: the shape is that of its values."""

    @property
    def shape(self) -> Sequence[int]: ...

    @property
    def optional(self) -> bool: ...


@dataclass(frozen=True)
class Renamed:
    """Weights whose names begin otherwise than engines expect."""

    wanted: str
    found: str
    count: int


@dataclass(frozen=True)
class InPlace:
    """Tensors, or modules of a part of a layer, that engines look for, and those in their place."""

    wanted: Sequence[str]
    found: Sequence[str]
    part: str = ""


def as_weight(name: str) -> str:
    """Return the name of a weight by that of the tensor with its values or codes."""
    module, _, last = name.rpartition(".")
    return f"{module}.weight" if last in _CODES else name


def renamed(wanted: Mapping[str, Wanted], there: Mapping[str, Stored]) -> list[Renamed]:
    """Return how the weights that are missing by their wanted names begin instead, the commonest
    first, where a good half of them is there under other names; else nothing. wanted: weights by
    the names that `as_weight` returns of them."""
    stored = {as_weight(name): one for name, one in there.items()}
    by_ending: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name in sorted(stored.keys() - wanted.keys()):
        by_ending[_ending(name)].append(name)
    pairs: dict[tuple[str, str], set[str]] = defaultdict(set)
    for name in sorted(wanted.keys() - stored.keys()):
        for other in by_ending[_ending(name)]:
            if holds(stored[other], wanted[name]):
                pairs[_beginnings(name, other)].add(name)
    told: set[str] = set()
    found = []
    for (first, instead), names in sorted(pairs.items(), key=lambda pair: -len(pair[1])):
        if own := names - told:
            found.append(Renamed(first, instead, len(own)))
            told |= own
    return found if 2 * len(told) > len(_missing(wanted, stored)) else []


def renamed_inside(wanted: Mapping[str, Wanted], there: Mapping[str, Stored]) -> InPlace | None:
    """Return the missing weights whose names have one component more, the same in all, and those
    names, where a good half of all that is missing is there so; `part` is that component."""
    stored = {as_weight(name): name for name in there}
    missing, pairs = _missing(wanted, stored), dict[str, dict[str, str]]()
    for name in sorted(stored.keys() - wanted.keys()):
        components = name.split(".")
        for at, one in enumerate(components):
            own = ".".join(components[:at] + components[at + 1 :])
            if own in wanted and own not in stored and holds(there[stored[name]], wanted[own]):
                pairs.setdefault(one, {})[own] = stored[name]
    part, found = max(pairs.items(), key=lambda pair: len(pair[1]), default=("", {}))
    if 2 * len(found) <= len(missing) or not found:
        return None
    return InPlace([*found], [*found.values()], part)


def renamed_singly(wanted: Mapping[str, Wanted], there: Mapping[str, Stored]) -> InPlace | None:
    """Return the missing weights and those that no engine looks for, where the latter have the
    shapes of the former: names that end alike are `renamed`'s to tell."""
    names = {as_weight(name): name for name in there}
    lasts = {_last(name) for name in wanted}  # others are of scales and the like
    missing = _missing(wanted, names)
    others = sorted(n for n in names.keys() - wanted.keys() if _last(n) in lasts)
    if not missing or len(missing) != len(others):
        return None
    left = [there[names[name]] for name in others]
    for one in map(wanted.__getitem__, missing):
        fitting = [tensor for tensor in left if holds(tensor, one)]
        if not fitting:
            return None
        left.remove(min(fitting, key=lambda tensor: tuple(tensor.shape) != tuple(one.shape)))
    return InPlace(missing, [names[name] for name in others])


def of_another_kind(wanted: Mapping[str, Wanted], there: Mapping[str, Stored]) -> list[InPlace]:
    """Return the parts of layers (attention, MLP) of which modules are missing that others lie in
    the place of, as those of another model's layer do."""
    missing, others = _missing(wanted, there), sorted(there.keys() - wanted.keys())
    lost, strange = (_modules_by_part(names) for names in (missing, others))
    here, known = (_modules_by_part(names) for names in (there, wanted))
    found = []
    for part, modules in lost.items():
        own = sorted(modules - here.get(part, set()))
        instead = sorted(strange.get(part, set()) - known[part])
        if len(own) >= _FEWEST <= len(instead):
            found.append(InPlace(own, instead, part))
    return found


def _missing(wanted: Mapping[str, Wanted], there: Collection[str]) -> list[str]:
    return [name for name, one in wanted.items() if not one.optional and name not in there]


_PARTS = frozenset({"self_attn", "mlp", "mixer"})


def _modules_by_part(names: Iterable[str]) -> dict[str, set[str]]:
    """Modules of parts of layers, each by the component after the part's, by the parts' names."""
    found: dict[str, set[str]] = defaultdict(set)
    for name in names:
        components = name.split(".")
        place = next((at for at, one in enumerate(components) if one in _PARTS), -1)
        if 0 <= place < len(components) - 1:
            found[".".join(components[: place + 1])].add(components[place + 1])
    return found


def holds(tensor: Stored, wanted: Wanted) -> bool:
    """Return whether a tensor has the shape of a weight, or as many bits as codes of it."""
    if tensor.dtype in FLOATS or tuple(tensor.shape) == tuple(wanted.shape):
        return tuple(tensor.shape) == tuple(wanted.shape)
    bits, elements = prod(tensor.shape) * tensor.dtype.bits, prod(wanted.shape)
    return len(wanted.shape) == 2 and bits in (of_code * elements for of_code in _BITS)


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _ending(name: str) -> tuple[str, ...]:
    """The components that tell a tensor in its layer: of an expert, with its number."""
    return tuple(name.split(".")[-4 if ".experts." in name else -2 :])


def _beginnings(name: str, other: str) -> tuple[str, str]:
    """Return two names without the components at their ends that are equal."""
    parts, own = name.split("."), other.split(".")
    while parts and own and parts[-1] == own[-1]:
        parts.pop()
        own.pop()
    return ".".join(parts), ".".join(own)
