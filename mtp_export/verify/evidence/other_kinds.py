"""Values of config.json's fields that say which tensors a layer has, taken from the tensors: kinds
of layers, and sizes that are null or 0."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from mtp_checkpoints.families.signs import NESTED
from mtp_checkpoints.tensors.bundle_folder import MAIN

if TYPE_CHECKING:
    from mtp_checkpoints.containers.base import TensorInfo
    from mtp_export.verify.evidence.parts import PartLayout

_Path = tuple[str, ...]
_Suffixes = frozenset[str]
Change = tuple[_Path, Any, Any]  # of a field by the way to it: its value, and another one

_LAYER = re.compile(r"\.layers\.(\d{1,6})\.")
_NUMBERS, _EXPERTS = re.compile(r"\d+(,\d+)*"), re.compile(r"(^|\.)(experts|moe)\.")
_EXPERT = re.compile(r"(experts\.)\d+")
_MOST_SIZES = 6  # that a field is tried with
_MAY_BE_NONE = re.compile(r"_rank$|shared_experts?$|shared_expert_intermediate_size$")
_RANK = "q_lora_rank"  # which releases that have none leave out
_PERIODS = re.compile(r"interval|freq|_step$|period")
_MOST_LAYERS = 8  # that a period is tried with


def fields_of(config: Mapping[str, Any], path: _Path = ()) -> Iterator[tuple[_Path, Any]]:
    """Yield the values of a config.json and its text part, each with the way to it."""
    for key, value in config.items():
        if key in NESTED and isinstance(value, Mapping):
            yield from fields_of(value, (*path, key))
        elif not isinstance(value, Mapping):
            yield (*path, key), value


def kinds_as_stored(config: Mapping[str, Any], layouts: Sequence[PartLayout]) -> Iterator[Change]:
    """Yield other lists and patterns of the kinds of layers: of each layer the kind whose tensors
    by config.json are most like those that are there; and other periods of them."""
    wanted, there = (_by_layer(layouts, stored=stored) for stored in (False, True))
    if not {*there.values()} <= {*wanted.values()}:  # a layer is as none should be
        return
    for path, value in fields_of(config):
        if _is_of_kinds(value, len(wanted)):
            best = _best_kinds(value, wanted, there)
            if best != [*value]:
                yield path, value, "".join(best) if isinstance(value, str) else best
        elif isinstance(value, str) and _NUMBERS.fullmatch(value):
            of_experts = (
                layer for layer, names in there.items() if any(map(_EXPERTS.search, names))
            )
            yield path, value, ",".join(map(str, sorted(of_experts)))
        elif type(value) is int and _PERIODS.search(path[-1]):
            periods = (one for one in range(1, _MOST_LAYERS + 1) if one != value)
            yield from ((path, value, one) for one in periods)


def _is_of_kinds(value: Any, layers: int) -> bool:
    """Return whether a value has a word or a letter for each of the layers, of a few kinds."""
    listed = isinstance(value, list) and all(isinstance(one, str) for one in value)
    is_pattern = isinstance(value, str) and len(value) == layers
    return (listed or is_pattern) and len(value) >= layers > 1 and 1 < len({*value}) < layers + 1


def _best_kinds(
    value: str | list[str],
    wanted: Mapping[int, _Suffixes],
    there: Mapping[int, _Suffixes],
) -> list[str]:
    known = defaultdict[str, set[_Suffixes]](set)
    for layer, kind in enumerate(value):
        if layer in wanted:
            known[kind].add(wanted[layer])

    def unlike(layer: int, kind: str) -> tuple[int, bool]:
        own = there.get(layer, frozenset())
        return min(len(own ^ one) for one in known[kind]), kind != value[layer]

    return [
        min(known, key=partial(unlike, layer)) if layer in wanted else kind
        for layer, kind in enumerate(value)
    ]


def _by_layer(layouts: Sequence[PartLayout], *, stored: bool) -> dict[int, _Suffixes]:
    """Names of tensors below each main layer, of those that are there or that should be."""
    found = defaultdict[int, set[str]](set)
    for layout in (one for one in layouts if one.name == MAIN):
        for name in layout.checkpoint.tensors if stored else layout.stored.tensors:
            if (layer := _LAYER.search(name)) is not None:
                found[int(layer[1])].add(_EXPERT.sub(r"\1*", name[layer.end() :]))
    return {layer: frozenset(names) for layer, names in found.items()}


def sizes_as_stored(
    config: Mapping[str, Any], tensors: Mapping[str, TensorInfo], layouts: Sequence[PartLayout]
) -> Iterator[Change]:
    """Yield sizes and numbers that are null or 0, or absent, as sizes of tensors: of those that are
    none of the model by its config.json, or, where no layouts follow from that, of vectors."""
    wanted = {name for layout in layouts for name in layout.stored.tensors}
    sizes = Counter(
        size
        for name in tensors.keys() - wanted
        if wanted or len(tensors[name].shape) == 1
        for size in tensors[name].shape
    )
    if not sizes:
        return
    fields = dict(fields_of(config))
    if all(path[-1] != _RANK for path in fields):
        inner = next((path[:-1] for path in fields if len(path) > 1), ())
        fields[(*inner, _RANK)] = None
    tried = dict.fromkeys((1, *(size for size, _ in sizes.most_common(_MOST_SIZES))))
    for path, value in fields.items():
        if (value is None or value == 0) and _MAY_BE_NONE.search(path[-1]):
            yield from ((path, value, size) for size in tried)
