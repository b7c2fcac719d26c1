"""Scales of quantized linears are their own: no other linear's, and not all one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import prod
from statistics import median
from typing import TYPE_CHECKING

from mtp_checkpoints.tensors.tensor_reader import read_rows
from mtp_export.progress import counted
from mtp_export.verify.check import Item, Problem, verdict
from mtp_export.verify.diagnosis.causes import copies, parts_lost
from mtp_export.verify.evidence.weight_facts import WeightFacts
from mtp_export.verify.weights.main_layer_copies import are_unlike
from mtp_export.verify.weights.value_checks import taken

if TYPE_CHECKING:
    from mtp_export.verify.context import Context

_ROWS = 64  # of scales that are read of each linear
_FEW = 8  # scales, or different ones, which two linears may share by chance


def run(context: Context) -> Iterator[Item]:
    """The linears of all parts; of those whose codes are another's, nothing more is said."""
    lost, named = context.unwritten_tensors, context.named_tensors
    facts = [
        fact
        for layout in context.read_layouts
        for fact in context.walks.of(layout.name).facts
        if fact.weight.has_scales
        and prod(fact.weight.tensors[1].shape) >= _FEW
        and fact.weight.stored.weight.is_linear_weight
        and fact.statistics.is_sound
        and fact.weight.name not in named
        and lost.isdisjoint(one.name for one in fact.weight.tensors)
    ]
    if facts:
        yield verdict("scales of their own", [*_problems(facts)], counted(len(facts), "linear"))


def _problems(facts: Sequence[WeightFacts]) -> Iterator[Problem]:
    first: dict[tuple[str, tuple[int, ...]], WeightFacts] = {}
    twins = list[tuple[str, str]]()
    for fact in facts:
        scale = fact.weight.tensors[1]
        twin = first.setdefault((fact.checksums[scale.name], scale.shape), fact)
        if twin is fact or twin.digest == fact.digest or _values(twin) < _FEW:
            continue
        if are_unlike((fact, twin)):  # and no layer that was trained on from another
            twins.append((fact.weight.name, twin.weight.name))
    yield from taken(twins, copies.scales_taken)
    kinds: dict[str, list[tuple[WeightFacts, int]]] = defaultdict(list)
    for fact in facts:
        kinds[fact.weight.stored.storage].append((fact, _values(fact)))
    for alike in kinds.values():
        if median(count for _, count in alike) < _FEW:  # one per matrix, or powers of two
            continue
        for fact, count in alike:
            if count == 1 and float(fact.weight.scale.float().std()) == 0:
                value = float(fact.weight.scale.flatten()[0])
                yield Problem(fact.weight.name, parts_lost.scales_all_one(fact.weight.name, value))


def _values(fact: WeightFacts) -> int:
    """Return the number of different scales in the first rows of a linear's."""
    import torch

    scale = fact.weight.tensors[1]
    return len(torch.unique(read_rows(scale, 0, min(_ROWS, scale.shape[0])).float()))
