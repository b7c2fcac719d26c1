"""Parts of tensor names: layer, expert, beginning and end."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from mtp_checkpoints.families.signs import in_layer

_MOST_DIGITS = 6
_EXPERT = re.compile(r"[a-z_]*exp(?:ert)?s?_?(\d{1,6})", re.ASCII)  # of a word and its number


def ending(name: str) -> tuple[str, ...]:
    """The components that tell a tensor in its layer: of an expert, with its number."""
    return tuple(name.split(".")[-4 if ".experts." in name else -2 :])


def beginnings_of(name: str, other: str) -> tuple[str, str]:
    """Return two names without the components at their ends that are equal."""
    parts, own = name.split("."), other.split(".")
    while parts and own and parts[-1] == own[-1]:
        parts.pop()
        own.pop()
    return ".".join(parts), ".".join(own)


def begins(name: str, beginning: str) -> bool:
    return not beginning or name.startswith(f"{beginning}.")


def _is_number(component: str) -> bool:
    """Return whether a component is the number of a layer or an expert, by its length too."""
    return component.isdecimal() and len(component) <= _MOST_DIGITS


def in_order(name: str) -> list[tuple[int, str]]:
    """A key by which layer 10 follows layer 9."""
    return [(int(one), "") if _is_number(one) else (-1, one) for one in name.split(".")]


def by_layer(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Weights by their layers, in the order of these, and by their names in them."""
    found: dict[str, dict[str, str]] = {}
    for name in sorted(names, key=in_order):
        layer, last = in_layer(name)
        if layer:
            found.setdefault(layer, {})[last] = name
    return found


def linear_of(name: str) -> str:
    """Return the last component of a weight's module, behind the one before it where it is the
    number of one of several."""
    *_, before, last = ("", "", *module_of(name).split("."))
    return f"{before}.{last}" if _is_number(last) else last


def module_of(name: str) -> str:
    return name.rpartition(".")[0]


Place = tuple[int, int]  # layer and expert, -1 of none


def place_of(name: str) -> Place:
    """The numbers of the layer and of the expert that a tensor is of."""
    layer = expert = -1
    before = ""
    for one in name.split("."):
        if _is_number(one) and "exp" in before:
            expert = int(one)
        elif (glued := _EXPERT.fullmatch(one)) is not None:
            expert = int(glued[1])
        elif _is_number(one) and layer < 0:
            layer = int(one)
        before = one
    return layer, expert


def same_layers(lost: Iterable[Place], strange: Iterable[Place]) -> dict[int, list[int]]:
    """The layers of other names that each layer may have: all, where one is missing; else its own
    number, or that in its place in their order."""
    own, others = (sorted({layer for layer, _ in places}) for places in (lost, strange))
    if len(own) <= 1:
        return dict.fromkeys(own, others)
    numbers, instead = ([one for one in layers if one >= 0] for layers in (own, others))
    if len(numbers) != len(instead):
        instead = numbers
    return {-1: [-1]} | {one: [other] for one, other in _instead(numbers, instead)}


def _instead(numbers: Sequence[int], found: Sequence[int]) -> list[tuple[int, int]]:
    """Return as many numbers of layers as there are, each with that of those found which is in its
    place: in order where all that are another's are as far from it, else first its own."""
    pairs = [*zip(numbers, found, strict=True)]
    if len({other - one for one, other in pairs} - {0}) > 1:
        kept = {*numbers} & {*found}
        rest = ([one for one in own if one not in kept] for own in (numbers, found))
        pairs = sorted([*((one, one) for one in kept), *zip(*rest, strict=True)])
    return pairs
