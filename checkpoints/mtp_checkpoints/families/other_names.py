"""Tensors of a module that are there under names that engines do not look for."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from mtp_checkpoints.families.name_parts import (
    Place,
    beginnings_of,
    begins,
    by_layer,
    ending,
    in_order,
    module_of,
    place_of,
    same_layers,
)
from mtp_checkpoints.families.name_words import agree, likeness, near, nearest
from mtp_checkpoints.families.parted_names import parts_of
from mtp_checkpoints.families.renamed import InPlace, OtherNames, Renamed
from mtp_checkpoints.families.stored_names import CODES, Stored, Wanted, as_weight, holds, last_of

_FEWEST = 2  # tensors of a rule
_GATE_AND_UP = ("gate_proj", "up_proj")
_MOSTLY = 0.5  # of the words of two names
_COMPARED = 100_000  # pairs of names


def other_names(
    wanted: Mapping[str, Wanted],
    there: Mapping[str, Stored],
    joins: Collection[tuple[str, ...]] = (),
) -> OtherNames | None:
    """Return the weights that are there under other names, of which each is at most one that is
    missing; where that is not a good half of what is missing, those whose names differ in a
    component alone, of like words. None for none.

    wanted: weights by the names that `as_weight` returns of them. joins: linears, by the last
    components of their names, that engines and trainers join, beside gate and up.
    """
    search = _Search(wanted, there)
    missing = [name for name in search.lost if not wanted[name].optional]
    if not missing or not search.strange:
        return None
    if (layers := search.renumbered()) is not None:
        return layers
    search.by_separators()
    search.by_beginnings()
    inside = search.by_components()
    pairs = (own[1:] for own in joins if len(own) > _FEWEST)  # as keys and values alone
    joined = [*search.joined({_GATE_AND_UP, *joins, *pairs}), *search.parted()]
    search.by_words()
    search.by_shapes()
    alike = search.alike()
    grouped = [name for one in (*joined, *alike) for name in (*one.wanted, *one.found)]
    told = sum(name in search.pairs or name in grouped for name in missing)
    is_half = 2 * told > len(missing)
    if not is_half:
        search.keep_near()
        inside, joined, alike, grouped, told = [], [], [], [], len(search.pairs)
        if not told:
            return None
    untold = [one for one in search.strange if one not in search.used and one not in grouped]
    beginnings, singly = search.beginnings(inside)
    return OtherNames(
        search.stored_pairs(search.pairs),
        beginnings,
        [search.as_stored(one) for one in inside],
        search.stored_pairs(singly),
        joined,
        [search.as_stored(one) for one in alike],
        [search.names[one] for one in untold],
        [name for name in missing if name not in search.pairs and name not in grouped],
        is_sure=is_half and len(untold) <= told,
    )


class _Search:
    """The weights that are missing and those that no engine looks for, matched by one sign after
    another: each takes what the signs before it left."""

    def __init__(self, wanted: Mapping[str, Wanted], there: Mapping[str, Stored]) -> None:
        self.wanted, self.there = wanted, there
        self.names = {as_weight(name): name for name in there}
        self.lost = sorted(wanted.keys() - self.names.keys(), key=in_order)
        lasts = {last_of(name) for name in wanted}
        self.lacking = {module_of(name) for name in self.lost if last_of(name) != "weight"}
        others = self.names.keys() - wanted.keys()
        own = (name for name in others if last_of(name) in lasts or not self._is_beside(name))
        self.strange = sorted(own, key=in_order)
        self.pairs: dict[str, str] = {}  # of those that are strange, by those that are lost
        self.used: set[str] = set()
        self.apart: set[str] = set()  # of those that are lost, those that are joined
        self.layer_of = {name: place_of(name)[0] for name in (*self.lost, *self.strange)}
        self.layers = same_layers(map(place_of, self.lost), map(place_of, self.strange))

    def _is_beside(self, name: str) -> bool:
        """Return whether a tensor is a weight's, as its scale is, and no bias of it is missing."""
        module = module_of(name)
        beside = (module, f"{module}.weight", module_of(module))  # the last of bitsandbytes' state
        return any(one in self.names for one in beside) and module not in self.lacking

    def _pair(self, pairs: Mapping[str, str]) -> None:
        self.pairs |= pairs
        self.used.update(pairs.values())

    def _free(self, name: str, other: str) -> bool:
        return name not in self.pairs and other not in self.used

    def _has(self, other: str, wanted: Wanted) -> bool:
        return holds(self.there[self.names[other]], wanted)

    def _holds(self, other: str, name: str) -> bool:
        return self._has(other, self.wanted[name])

    def _may_be(self, name: str, other: str) -> bool:
        """Return whether a tensor may be one that is missing: where its layer has another number in
        the order of these, of the layer that has that."""
        own, layers = self.layer_of[name], self.layers[self.layer_of[name]]
        of_layer = layers == [own] or self.layer_of[other] in layers
        return of_layer and self._holds(other, name)

    def renumbered(self) -> OtherNames | None:
        """All modules of several in order, some of them under another's name, each of which holds
        what the module in its place is to hold."""
        known = [name for name in self.names if name in self.wanted]
        own, theirs = by_layer(self.wanted), by_layer([*known, *self.strange])
        if len(own) < _FEWEST or len(own) != len(theirs) or own.keys() == theirs.keys():
            return None
        moved = {place_of(o)[0] - place_of(n)[0] for n, o in zip(own, theirs, strict=True)}
        if len(moved - {0}) > 1:
            return None
        pairs, rules = dict[str, str](), list[Renamed]()
        for layer, found in zip(own, theirs, strict=True):
            if not theirs[found].keys() <= own[layer].keys() or any(
                not self.wanted[name].optional and last not in theirs[found]
                for last, name in own[layer].items()
            ):
                return None
            own_pairs = {own[layer][last]: other for last, other in theirs[found].items()}
            if not all(self._holds(other, name) for name, other in own_pairs.items()):
                return None
            if layer != found:
                pairs |= own_pairs
                rules.append(Renamed(layer, found, len(own_pairs)))
        are_names = any(rule.found in own for rule in rules)
        if not are_names or not {*pairs.values()}.issuperset(self.strange):
            return None
        return OtherNames(
            self.stored_pairs(pairs), rules, [], {}, [], [], untold=[], lacking=[], is_sure=True
        )

    def by_separators(self) -> None:
        """Names with other marks between their components, as JAX's tools write them."""
        lost = {*self.lost}
        dotted = {as_weight(self.names[one].replace("/", ".")): one for one in self.strange}
        self._pair({name: o for name, o in dotted.items() if name in lost and self._holds(o, name)})

    def by_beginnings(self) -> None:
        """Names that end alike, those first whose beginnings most have."""
        by_ending: dict[tuple[str, ...], list[str]] = defaultdict(list)
        for other in self.strange:
            by_ending[ending(other)].append(other)
        found: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
        for name in self.lost:
            others = by_ending[ending(name)]
            whole = [o for o in others if o.endswith(f".{name}") or name.endswith(f".{o}")]
            for other in whole or others:
                if self._may_be(name, other):
                    found[beginnings_of(name, other)][name] = other
        self._take_largest(found)

    def by_components(self) -> list[InPlace]:
        """Names that have one component more, which several have."""
        found: dict[str, dict[str, str]] = defaultdict(dict)
        lost = {name for name in self.lost if name not in self.pairs}
        for other in (one for one in self.strange if one not in self.used):
            components = other.split(".")
            for at, one in enumerate(components):
                name = ".".join(components[:at] + components[at + 1 :])
                if name in lost and self._may_be(name, other):
                    found[one][name] = other
        several = {part: own for part, own in found.items() if len(own) >= _FEWEST}
        self._take_largest({(part, ""): own for part, own in several.items()})
        own = {
            part: [name for name, other in pairs.items() if self.pairs.get(name) == other]
            for part, pairs in several.items()
        }
        return [
            InPlace(names, [self.pairs[name] for name in names], part)
            for part, names in own.items()
            if len(names) >= _FEWEST
        ]

    def _take_largest(self, groups: Mapping[tuple[str, str], dict[str, str]]) -> None:
        """Pair what is free, of the largest group first, each time of those that are left: of
        equal ones of that whose names are most alike."""
        heap = [
            (-len(own), -likeness(*pair), place, own)
            for place, (pair, own) in enumerate(groups.items())
        ]
        heapify(heap)
        while heap:
            size, like, place, own = heappop(heap)
            free = {name: other for name, other in own.items() if self._free(name, other)}
            if len(free) == -size:
                self._pair(free)
            elif free:
                heappush(heap, (-len(free), like, place, free))

    def joined(self, joins: Collection[tuple[str, ...]]) -> list[InPlace]:
        """One tensor alone of the rows of several of a module that are missing."""
        missing = {name for name in self.lost if name not in self.pairs}
        free = self._unlike(missing)
        wholes: dict[tuple[str, ...], list[str]] = {}
        for name in sorted(missing):
            parent, first, last = name.rsplit(".", 2) if name.count(".") > 1 else ("", "", "")
            others = free.get(place_of(name)[1], ())
            for own in (one for one in joins if one[0] == first):
                parts = tuple(f"{parent}.{one}.{last}" for one in own)
                if missing.issuperset(parts):
                    whole = _Whole.of([self.wanted[one] for one in parts])
                    fitting = [o for o in others if agree(name, o) and self._has(o, whole)]
                    layers = self.layers[self.layer_of[name]]
                    own_layer = [o for o in fitting if self.layer_of[o] in layers]
                    wholes[parts] = own_layer or fitting
        counts = Counter(other for others in wholes.values() for other in others)
        found = [
            InPlace(parts, others)
            for parts, others in wholes.items()
            if len(others) == 1 == counts[others[0]]
        ]
        self.apart.update(name for one in found for name in one.wanted)
        self.used.update(name for one in found for name in one.found)
        return found

    def _unlike(self, missing: Iterable[str]) -> dict[int, list[str]]:
        """Return what is free and like none that is missing, by the numbers of experts."""
        lost, free = defaultdict[int, list[str]](list), defaultdict[int, list[str]](list)
        for name in missing:
            lost[place_of(name)[1]].append(name)
        for other in (one for one in self.strange if one not in self.used):
            expert = place_of(other)[1]
            if not any(self._is_like(other, name) for name in lost[expert]):
                free[expert].append(other)
        return free

    def _is_like(self, other: str, name: str) -> bool:
        """Return whether a tensor is one that is missing, by its shape and most of its words."""
        return likeness(name, other) >= _MOSTLY and self._holds(other, name)

    def parted(self) -> list[InPlace]:
        """Several tensors that are parts of one that is missing."""
        found = []
        for names, others in self._by_expert():
            for name in names:
                left = (self.names[other] for other in others if other not in self.used)
                shapes = [(other, self.there[other].shape) for other in left]
                if parts := parts_of(name, self.wanted[name].shape, shapes):
                    found.append(InPlace([name], parts))
                    self.used.update(parts)
        self.apart.update(name for one in found for name in one.wanted)
        return found

    def by_words(self) -> None:
        """Names of the same meaning, where each is nearest to the other alone."""
        for names, others in self._by_expert():
            alike = {
                (name, other): (likeness(name, other), not self.wanted[name].optional)
                for name, other in self._fitting(names, others)
            }
            alike = {pair: like for pair, like in alike.items() if like[0]}
            while pairs := nearest(alike):
                self._pair(pairs)
                alike = {pair: like for pair, like in alike.items() if self._free(*pair)}

    def by_shapes(self) -> None:
        """One alone of the shape of one that alone is missing."""
        for names, others in self._by_expert():
            required = [name for name in names if not self.wanted[name].optional]
            fitting = [*self._fitting(required, others)]
            for name, other in fitting:
                if sum(name in pair or other in pair for pair in fitting) == 1:
                    self._pair({name: other})

    def alike(self) -> list[InPlace]:
        """As many as are missing of a shape, and none of which is told."""
        found = []
        for names, others in self._by_expert():
            required = [name for name in names if not self.wanted[name].optional]
            by_fitting: dict[tuple[str, ...], list[str]] = defaultdict(list)
            for name in required:
                own = tuple(o for n, o in self._fitting([name], others))
                by_fitting[own].append(name)
            found += [InPlace(n, o) for o, n in by_fitting.items() if len(o) == len(n) > 1]
        return found

    def keep_near(self) -> None:
        """Leave the pairs alone whose names tell them whatever else is missing."""
        self.pairs = {name: other for name, other in self.pairs.items() if near(name, other)}
        self.used = {*self.pairs.values()}

    def _by_expert(self) -> Iterator[tuple[list[str], list[str]]]:
        """Yield what is free, of each layer's experts and of what is of none: of several layers the
        first is the first of those that no engine looks for."""
        lost, strange = defaultdict[Place, list[str]](list), defaultdict[Place, list[str]](list)
        for name in self.lost:
            if name not in self.pairs and name not in self.apart:
                lost[place_of(name)].append(name)
        for other in self.strange:
            if other not in self.used:
                strange[place_of(other)].append(other)
        layers = same_layers(lost, strange)
        for (layer, expert), names in lost.items():
            others = [o for own in layers[layer] for o in strange.get((own, expert), ())]
            if len(names) * len(others) <= _COMPARED:
                yield names, others

    def _fitting(self, names: Iterable[str], others: Sequence[str]) -> Iterator[tuple[str, str]]:
        for name in names:
            for other in others:
                if agree(name, other) and self._holds(other, name):
                    yield name, other

    def beginnings(self, inside: Sequence[InPlace]) -> tuple[list[Renamed], dict[str, str]]:
        """Return the rules by which several are renamed, and the pairs that none is true of. A rule
        is of all that begin so, unless a longer one is, or what is told singly."""
        groups: dict[tuple[str, str], list[str]] = defaultdict(list)
        of_component = {name for one in inside for name in one.wanted}
        for name, other in self.pairs.items():
            if name not in of_component and ending(name) == ending(other):
                groups[beginnings_of(name, other)].append(name)
        right = [*(self.names.keys() & self.wanted.keys())]
        rules, ruled = dict[str, Renamed](), set(of_component)
        for (wanted, found), names in sorted(groups.items(), key=lambda group: -len(group[1])):
            is_rule = len(names) >= _FEWEST and not any(begins(one, found) for one in right)
            if is_rule and found not in rules:
                rules[found] = Renamed(wanted, found, len(names))
                ruled.update(names)
        return [*rules.values()], {n: o for n, o in self.pairs.items() if n not in ruled}

    def stored_pairs(self, pairs: Mapping[str, str]) -> dict[str, str]:
        return {self.names[other]: self._as_found(name, other) for name, other in pairs.items()}

    def as_stored(self, one: InPlace) -> InPlace:
        pairs = zip(one.wanted, one.found, strict=True)
        wanted = [self._as_found(name, other) for name, other in pairs]
        return InPlace(wanted, [self.names[other] for other in one.found], one.part)

    def _as_found(self, name: str, other: str) -> str:
        """The wanted name of a tensor: of codes, with their own last component."""
        last = last_of(self.names[other])
        return f"{name.rpartition('.')[0]}.{last}" if last in CODES else name


class _Whole(NamedTuple):
    """Several weights that are joined by their rows."""

    shape: tuple[int, ...]
    optional: bool = False

    @classmethod
    def of(cls, parts: Sequence[Wanted]) -> _Whole:
        shapes = {tuple(one.shape[1:]) for one in parts}
        rows = sum(one.shape[0] for one in parts)
        return cls((rows, *shapes.pop())) if len(shapes) == 1 else cls(())
