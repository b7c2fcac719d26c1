"""Weights that are there under names that engines do not look for, as they are told."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mtp_checkpoints.families.name_parts import module_of


@dataclass(frozen=True)
class Renamed:
    """Weights whose names begin otherwise than engines expect, all of that beginning alike."""

    wanted: str
    found: str
    count: int


@dataclass(frozen=True)
class InPlace:
    """Tensors, or modules of a part of a layer, that engines look for, and those in their place;
    part is the component that these have more, or the part of the layer."""

    wanted: Sequence[str]
    found: Sequence[str]
    part: str = ""


@dataclass(frozen=True)
class OtherNames:
    """Weights of a module under other names, each with the name that it should have.

    pairs: the wanted names of the stored ones, all. Told in short: beginnings, the commonest first;
    inside, of names that have one component more, which is its part; singly, the pairs of neither.
    joined: one tensor each of the rows of several, or several parts of one. alike: tensors of equal
    shapes whose names do not tell which is which. untold: tensors that no engine looks for and that
    are nothing that is missing; lacking: weights that no name is for.
    is_sure: a good half of what is missing is here, and more than what is untold.
    """

    pairs: Mapping[str, str]
    beginnings: Sequence[Renamed]
    inside: Sequence[InPlace]
    singly: Mapping[str, str]
    joined: Sequence[InPlace]
    alike: Sequence[InPlace]
    untold: Sequence[str]
    lacking: Sequence[str]
    is_sure: bool

    def by_own_names(self, names: Iterable[str]) -> list[str]:
        """Return tensors, those of modules that are renamed by the names that these should have."""
        modules = {module_of(name): module_of(own) for name, own in self.pairs.items()}
        parts = ((*name.rpartition("."), modules.get(module_of(name))) for name in names)
        return [f"{own or module}.{last}" for module, _, last, own in parts]
