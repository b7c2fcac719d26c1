"""Matrices and norms of which many elements are as large as the largest one, as what is cut off at
a size has them, or of which a run of rows, columns or elements is zero."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from mtp_checkpoints.families.base import Role
from mtp_export.verify.check import Item, Problem, verdict
from mtp_export.verify.context import Context
from mtp_export.verify.diagnosis.causes import balance as causes
from mtp_export.verify.diagnosis.causes import parts_lost
from mtp_export.verify.evidence.mlp_notes import Note
from mtp_export.verify.evidence.weight_facts import WeightFacts
from mtp_export.verify.gates import (
    LEAST_BETWEEN,
    MOST_AT_ENDS,
    MOST_FILLED_RUN,
    MOST_ZERO_RUN,
    MOST_ZERO_TOKENS,
)
from mtp_export.verify.weights.extents import (
    extent_words,
    run_words,
    share_words,
    zero_extent,
)

_LEAST_ELEMENTS = 2  # of a norm, of which one may be rounded to zero
_LEAST_FILLED = 8  # of a norm, of which fewer may have one value by chance
# Their rows are tokens, some of which no text has.
_OF_TOKENS = (Role.EMBEDDING, Role.HEAD, Role.OWN_EMBEDDING, Role.OWN_HEAD)


def run(context: Context) -> Iterator[Item]:
    """The matrices and norms of all parts that the walk looked into, but for those that an earlier
    item is about."""
    facts, named = [*noted(context)], context.named_tensors
    if facts:
        told = (one for one in facts if one.weight.name not in named)
        wrong = [problem for one in told for problem in _problems(one, one.note)]
        yield verdict("no weight is cut off or lost in part", wrong, f"{len(facts):,} weights")


def noted(context: Context) -> Iterator[WeightFacts]:
    """Yield what the walk found of the weights of all parts that it looked into."""
    for layout in context.read_layouts:
        for one in context.walks.of(layout.name).facts:
            names = (tensor.name for tensor in one.weight.tensors)
            is_written = context.unwritten_tensors.isdisjoint(names)
            if one.note is not None and not one.statistics.is_constant and is_written:
                yield one


def _problems(fact: WeightFacts, note: Note | None) -> Iterator[Problem]:
    assert note is not None, "what was looked into"
    name, (at_ends, between) = fact.weight.name, note.ends
    is_cut_off = at_ends > MOST_AT_ENDS and between > LEAST_BETWEEN
    filled = [*_filled(fact, is_cut_off)] if len(fact.weight.stored.weight.shape) == 1 else []
    yield from filled
    if is_cut_off and not filled:
        yield Problem(name, causes.cut_off(name, at_ends))
    for axis, squares in {"columns": note.columns, "rows": note.rows}.items():
        start, stop = _zero_run(squares)
        least = 1 if len(fact.weight.stored.weight.shape) > 1 else _LEAST_ELEMENTS
        if stop - start >= max(least, MOST_ZERO_RUN * len(squares)):
            yield from _lost(fact, axis, range(start, stop))


def _filled(fact: WeightFacts, is_cut_off: bool) -> Iterator[Problem]:
    """Yield what of a norm was filled with one value that no other element of it has. is_cut_off:
    it would be cut off at that value, if it is none that tools fill in."""
    values = fact.weight.encoded(0, fact.weight.rows).dequantize().tolist()
    start, stop = max(_runs(values), key=lambda run: run[1] - run[0])
    size, is_rare = stop - start, values.count(values[start]) < 2 * (stop - start)
    if is_cut_off and abs(values[start]) != 1:
        return
    if values[start] and size >= max(_LEAST_FILLED, MOST_FILLED_RUN * len(values)) and is_rare:
        place, share = run_words("elements", range(start, stop)), share_words(size / len(values))
        words = parts_lost.part_filled(fact.weight.name, place, share, values[start])
        yield Problem(fact.weight.name, words)


def _runs(values: Sequence[float]) -> Iterator[tuple[int, int]]:
    """Yield the start and the end of each run of one value."""
    at = 0
    for _, alike in groupby(values):
        size = len(list(alike))
        yield at, at + size
        at += size


def _lost(fact: WeightFacts, axis: str, run: range) -> Iterator[Problem]:
    """Yield what is lost of a weight by a run of zeros among the rows or columns that were looked
    into."""
    weight, spec = fact.weight, fact.weight.stored.weight
    of_tokens = spec.role in _OF_TOKENS
    if len(spec.shape) > 1 and (not of_tokens or axis == "rows"):
        at = (run.start, 0) if axis == "rows" else (0, run.start)
        extent = zero_extent(weight, *at)
        if not of_tokens or len(extent.rows) >= MOST_ZERO_TOKENS * weight.rows:
            yield Problem(weight.name, extent_words(weight, extent))
    elif axis == "columns":
        one = len(spec.shape) == 1
        place = run_words("elements" if one else axis, run)
        share: str = share_words(len(run) / spec.shape[-1])
        scales: parts_lost.Scales = "apart" if weight.has_scales else "none"
        words = parts_lost.part_zero(weight.name, place, share, spec.shape, scales)
        yield Problem(weight.name, words)


def _zero_run(squares: Sequence[float]) -> tuple[int, int]:
    """The longest run of zeros: its start, and its end."""
    runs = [run for run in _runs(squares) if squares[run[0]] == 0]
    return max(runs, key=lambda one: one[1] - one[0], default=(0, 0))
