"""Runs of rows, columns or elements that are larger or smaller than the others of their weight, as
what multiplies a part of it makes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import exp, inf
from typing import TYPE_CHECKING, NamedTuple

from mtp_export.verify.check import Item, Problem, verdict
from mtp_export.verify.diagnosis.causes import balance as causes
from mtp_export.verify.evidence.mlp_notes import Note
from mtp_export.verify.evidence.weight_facts import WeightFacts
from mtp_export.verify.gates import LEAST_STEP, LEAST_STEP_ERRORS, MOST_STEPS
from mtp_export.verify.weights.cut_off import noted

if TYPE_CHECKING:
    from mtp_export.verify.context import Context

_ROWS, _COLUMNS, _ELEMENTS = "rows", "columns", "elements"
# Matrices in the order of whose rows, or columns, nothing lies, by the last part of their names:
# that of heads, of rotary pairs and of two matrices in one means something.
_FREE_ROWS = ("gate_proj", "up_proj", "down_proj", "o_proj", "out_proj", "eh_proj", "fc")
_FREE_COLUMNS = ("gate_proj", "up_proj", "down_proj", "gate", "lm_head", "embed_tokens",
                 "q_proj", "k_proj", "v_proj", "q_a_proj", "q_b_proj", "kv_b_proj")  # fmt: skip
_HEADS = ("attn.", "attention.")  # norms of which are of a head
_LEAST_SIZE, _LEAST_SHARE = 32, 1 / 16  # of an axis; and of it, of a run and of the others


class _Step(NamedTuple):
    """A run, and how far its logarithms lie from the others' in the mean."""

    first: int
    last: int
    by: float


def run(context: Context) -> Iterator[Item]:
    """The weights of all parts that the walk looked into, but for those that an earlier item is
    about. None is named where many have steps: a model may have been made so, as where its channels
    were sorted to be pruned."""
    facts, named = [*noted(context)], context.named_tensors
    if facts:
        others = (one for one in facts if one.weight.name not in named)
        wrong = [problem for one in others for problem in _problems(one, one.note)]
        figure = f"{len(facts):,} weights"
        if len(wrong) > MOST_STEPS:
            wrong, figure = [], f"{figure}, {len(wrong):,} runs of another size: it was made so"
        yield verdict("no part of a weight is of another size", wrong, figure)


def _problems(fact: WeightFacts, note: Note | None) -> Iterator[Problem]:
    assert note is not None, "what was looked into"
    squares = {_ROWS: note.rows, _COLUMNS: note.columns, _ELEMENTS: note.columns}
    for axis in _free(fact):
        if (step := _step(squares[axis])) is not None:
            name, factor = fact.weight.name, exp(step.by)
            yield Problem(name, causes.run_scaled(name, axis, step.first, step.last, factor))


def _free(fact: WeightFacts) -> Iterator[str]:
    """Yield the axes of a weight in whose order nothing lies."""
    spec = fact.weight.stored.weight
    own = spec.name.removesuffix(".weight").rpartition(".")[2]
    if len(spec.shape) > 1:
        yield from (_ROWS,) if own in _FREE_ROWS else ()
        yield from (_COLUMNS,) if own in _FREE_COLUMNS else ()
    elif not any(part in spec.name for part in _HEADS):
        yield _ELEMENTS


def _step(squares: Sequence[float]) -> _Step | None:
    """The run between the ends of the widest swing of the sums of logarithms less their mean."""
    import numpy as np

    size = len(squares)
    if size < _LEAST_SIZE or not all(0 < one < inf for one in squares):
        return None
    logs = 0.5 * np.log(np.asarray(squares))
    sums = np.cumsum(logs - logs.mean())
    start, stop = sorted((int(sums.argmin()) + 1, int(sums.argmax()) + 1))
    count, others = stop - start, size - (stop - start)
    if min(count, others) < _LEAST_SHARE * size:
        return None
    inside, outside = logs[start:stop], np.concatenate([logs[:start], logs[stop:]])
    by = float(inside.mean() - outside.mean())
    spread = (inside.var() * count + outside.var() * others) / (size - 2)
    error = float((spread * (1 / count + 1 / others)) ** 0.5)
    is_step = abs(by) > LEAST_STEP and abs(by) > LEAST_STEP_ERRORS * error
    return _Step(start, stop - 1, by) if is_step else None
