"""Sizes of matrices: sane by themselves, beside others of their kind, and those of the MTP module
beside the main layers'."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING

from mtp_checkpoints.families.base import FLOATS, Role
from mtp_checkpoints.families.signs import in_layer
from mtp_checkpoints.formats import UNQUANTIZED
from mtp_checkpoints.weights.weight_values import WeightOnDisk
from mtp_export.progress import counted
from mtp_export.verify import gates
from mtp_export.verify.check import Item, Problem, judged, verdict
from mtp_export.verify.diagnosis.causes import balance, parts_lost
from mtp_export.verify.diagnosis.causes import weights as causes
from mtp_export.verify.evidence.weight_facts import WeightFacts
from mtp_export.verify.weights.labels import mislabelled_by_size
from mtp_export.verify.weights.mtp_values import scale_ratio

if TYPE_CHECKING:
    from mtp_checkpoints.families.base import TensorSpec
    from mtp_export.verify.context import Context

_A_PAIR = 2
_FEW_SIZES = 4  # of which none is far from the others by chance


def written_facts(context: Context, facts: Sequence[WeightFacts]) -> Sequence[WeightFacts]:
    """The facts of weights outside the ends of files that were not written."""
    names = context.unwritten_tensors
    if not names:
        return facts
    return [f for f in facts if names.isdisjoint(tensor.name for tensor in f.weight.tensors)]


def varies(fact: WeightFacts) -> bool:
    """True for sound values that are not all the same."""
    return fact.statistics.is_sound and not fact.statistics.is_constant


def _kind(name: str) -> str:
    """A weight's name in its layer, a main one or a module's, without the numbers of experts."""
    return re.sub(r"\.\d+\.", ".*.", in_layer(name)[1])


def scales_alike(facts: Sequence[WeightFacts]) -> Item:
    """The root mean square of every matrix is sane, absolutely and beside others of its kind."""
    kinds, (low, high) = _by_kind(facts), gates.RMS_RANGE
    problems, most = [], 1.0
    usual = median(rms for alike in kinds.values() for _, rms in alike) if kinds else 1.0
    for alike in kinds.values():
        middle = _middle([rms for _, rms in alike], usual)
        for fact, rms in alike:
            ratio = max(rms / middle, middle / rms)
            most = max(most, ratio)
            if ratio > gates.RMS_RATIO:
                problems.append(Problem(fact.weight.name, _size_words(fact, rms, middle)))
            elif not low <= rms <= high:
                words = mislabelled_by_size(fact.weight, usual)
                words = words or causes.of_no_matrix(fact.weight.name, rms)
                problems.append(Problem(fact.weight.name, words))
    return verdict(
        "sane size of every matrix",
        problems,
        figure=f"up to {most:.3g} times its kind's median",
        bound=f"≤ {gates.RMS_RATIO:.0f} times",
    )


def far_from_like(context: Context) -> Iterator[Item]:
    """No matrix is of another size than all others of its kind, which are near to each other, and
    no linear than all others, but for those that an earlier item is about."""
    facts = [
        fact
        for layout in context.read_layouts
        for fact in written_facts(context, context.walks.of(layout.name).facts)
    ]
    problems, named = [*_of_all_linears(facts)], context.named_tensors
    problems = [one for one in problems if one.subject not in named]
    named |= {one.subject for one in problems}
    for alike in _by_kind(facts).values():
        sizes = sorted(rms for _, rms in alike)
        for fact, rms in alike:
            if is_alone(rms, sizes) and fact.weight.name not in named:
                words = causes.out_of_proportion(fact.weight.name, rms, median(sizes))
                problems.append(Problem(fact.weight.name, words))
    if facts:
        yield verdict("every matrix near its like", problems, counted(len(facts), "weight"))


def _by_kind(
    facts: Sequence[WeightFacts],
) -> Mapping[str, Sequence[tuple[WeightFacts, float]]]:
    """Matrices that vary, by their kind, each with its root mean square."""
    kinds: dict[str, list[tuple[WeightFacts, float]]] = defaultdict(list)
    for fact in facts:
        spec = fact.weight.stored.weight
        is_values = spec.dtypes[0] in FLOATS  # no codes of fused experts, whose scales lie apart
        if varies(fact) and len(spec.shape) > 1 and is_values:
            kinds[_kind(spec.name)].append((fact, fact.statistics.root_mean_square))
    return kinds


def _of_all_linears(facts: Sequence[WeightFacts]) -> Iterator[Problem]:
    """Yield the linear, or projection of a module, that is larger or smaller by far than all
    others."""
    sizes = {
        fact.weight.name: fact.statistics.root_mean_square
        for fact in facts
        if varies(fact) and _is_linear(fact.weight.stored.weight)
    }
    ordered = sorted(sizes.values())
    for name, size in sizes.items():
        if is_alone(size, ordered, gates.LINEAR_RATIO):
            nearest, among = (ordered[-2], "largest")
            if size == ordered[0]:
                nearest, among = (ordered[1], "smallest")
            yield Problem(name, balance.linear_of_another_size(name, size / nearest, among))


def _is_linear(spec: TensorSpec) -> bool:
    is_values = spec.dtypes[0] in FLOATS  # no codes of fused experts, whose scales lie apart
    return is_values and (spec.is_linear_or_projection or spec.role is Role.MTP_INPUT)


def is_alone(size: float, sizes: Sequence[float], least: float = gates.GAP_RATIO) -> bool:
    """Return whether the largest or the smallest size of a kind is far from all others, by so many
    times at least, which are near to each other. sizes: of all, in order."""
    if len(sizes) < _FEW_SIZES:
        return False
    others, gap = (sizes[:-1], sizes[-1] / sizes[-2])
    if size == sizes[0]:
        others, gap = (sizes[1:], sizes[1] / sizes[0])
    elif size != sizes[-1]:
        return False
    return gap > max(least, (others[-1] / others[0]) ** 2)


def _middle(sizes: Sequence[float], usual: float) -> float:
    """Return the median of some sizes; of two the one that is nearer to the usual one."""
    if len(sizes) == _A_PAIR:
        return min(sizes, key=lambda size: max(size / usual, usual / size))
    return median(sizes)


def _size_words(fact: WeightFacts, rms: float, middle: float) -> str:
    """Words for a matrix of an implausible size: of a single scale where that alone makes it."""
    name, ratio = fact.weight.name, scale_ratio(fact.weight)
    if ratio is not None and ratio > gates.SCALE_RATIO:
        return causes.scale_out_of_proportion(name, ratio)
    words = mislabelled_by_size(fact.weight, middle)
    return words or causes.out_of_proportion(name, rms, middle)


def has_scales_of_one(weight: WeightOnDisk) -> bool:
    """Return whether all scales are 1: they were left out."""
    return weight.has_scales and bool((weight.scale.float() == 1).all())


def parts_alike(
    main: Sequence[WeightFacts], mtp: Sequence[WeightFacts], offset: float
) -> Iterator[Item]:
    """The MTP module's linears are as large as the main layers': the median over their kinds of
    the ratio of their root mean squares. Where scales of channels were moved from the norms of one
    part into its linears (SmoothQuant), the norms make up for it. offset: of norms."""
    ratio, count = _ratio(_sizes_by_kind(main), _sizes_by_kind(mtp))
    if not count:
        return
    least, most = 1 / gates.PART_RATIO, gates.PART_RATIO
    figure = f"{ratio:.3g} times, in {counted(count, 'kind')}"
    is_alike = least <= ratio <= most
    if not is_alike:
        norms, found = _ratio(_norms_by_kind(main, offset), _norms_by_kind(mtp, offset))
        is_alike = found > 0 and least <= ratio * norms <= most
        figure += f"; norms {norms:.3g} times"
    first = next(fact.weight for fact in mtp if fact.weight.stored.weight.is_linear_weight)
    dtype = str(first.tensors[0].dtype) if first.stored.format is UNQUANTIZED else ""
    words = causes.part_out_of_proportion(ratio, dtype)
    if not is_alike and has_scales_of_one(first):
        words = parts_lost.scales_all_one(first.name, 1)
    yield judged(
        "mtp: linears as large as the main model's",
        is_alike,
        words,
        subject=first.name,
        figure=figure,
        bound=f"{least:.3g} to {most:.0f} times",
    )


def _ratio(
    main: Mapping[str, Sequence[float]], mtp: Mapping[str, Sequence[float]]
) -> tuple[float, int]:
    """Return the median ratio of the sizes of kinds that both parts have, and their number."""
    ratios = [median(mtp[kind]) / median(main[kind]) for kind in mtp if kind in main]
    return (median(ratios), len(ratios)) if ratios else (1.0, 0)


def _norms_by_kind(facts: Sequence[WeightFacts], offset: float) -> Mapping[str, Sequence[float]]:
    """Root mean squares of what norms before linears multiply by, by their kind."""
    sizes: dict[str, list[float]] = defaultdict(list)
    for fact in facts:
        spec = fact.weight.stored.weight
        if spec.role is Role.NORM and spec.name.endswith("layernorm.weight") and varies(fact):
            values = fact.weight.encoded(0, fact.weight.rows).dequantize().double() + offset
            sizes[_kind(spec.name)].append(float(values.square().mean().sqrt()))
    return sizes


def _sizes_by_kind(facts: Sequence[WeightFacts]) -> Mapping[str, Sequence[float]]:
    """Root mean squares of linears by their kind, which the layers of both parts share."""
    sizes: dict[str, list[float]] = defaultdict(list)
    for fact in facts:
        spec = fact.weight.stored.weight
        if varies(fact) and spec.is_linear_weight:
            sizes[_kind(spec.name)].append(fact.statistics.root_mean_square)
    return sizes
