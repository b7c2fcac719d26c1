"""Tensors of a module that are there under names that engines do not look for, and parts of another
model's layer in their place."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

_FEWEST = 2  # modules by which a part of a layer is known as another's


class HasShape(Protocol):
    """A tensor, as far as telling it by its shape needs it."""

    @property
    def shape(self) -> Sequence[int]: ...


class Wanted(HasShape, Protocol):
    """A tensor that engines look for, unless it is optional."""

    @property
    def optional(self) -> bool: ...


@dataclass(frozen=True)
class Renamed:
    """Tensors whose names begin otherwise than engines expect."""

    wanted: str
    found: str
    count: int


@dataclass(frozen=True)
class InPlace:
    """Tensors, or modules of a part of a layer, that engines look for, and those in their place."""

    wanted: Sequence[str]
    found: Sequence[str]
    part: str = ""


def renamed(wanted: Mapping[str, HasShape], there: Mapping[str, HasShape]) -> Renamed | None:
    """Return how most tensors that are missing by their wanted names begin instead, where a good
    half of them is there under other names, of the same shapes; None where it is not."""
    missing, others = wanted.keys() - there.keys(), there.keys() - wanted.keys()
    by_ending: dict[tuple[object, ...], list[str]] = defaultdict(list)
    for name in others:
        by_ending[_ending(name), _size(there[name])].append(name)
    pairs = Counter(
        _beginnings(name, other)
        for name in missing
        for other in by_ending[_ending(name), _size(wanted[name])]
    )
    for (first, instead), count in pairs.most_common(1):
        if 2 * count > len(missing):
            return Renamed(first, instead, count)
    return None


def renamed_singly(wanted: Mapping[str, Wanted], there: Mapping[str, HasShape]) -> InPlace | None:
    """Return the missing tensors and those that no engine looks for, where the latter have the
    shapes of the former: names that end alike are `renamed`'s to tell."""
    missing, others = _missing(wanted, there), sorted(there.keys() - wanted.keys())
    sizes = Counter(_size(there[name]) for name in others)
    if not missing or Counter(_size(wanted[name]) for name in missing) != sizes:
        return None
    return InPlace(missing, others)


def of_another_kind(wanted: Mapping[str, Wanted], there: Mapping[str, HasShape]) -> list[InPlace]:
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


def _size(tensor: HasShape) -> tuple[int, ...]:
    return tuple(tensor.shape)


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
