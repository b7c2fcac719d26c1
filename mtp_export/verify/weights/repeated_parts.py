"""Linears and norms of which a part holds the same as another, as where one rank's part was written
for two, or values in the place of keys in a joined projection."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from mtp_checkpoints.families.base import Role
from mtp_export.progress import counted
from mtp_export.verify import gates
from mtp_export.verify.check import Item, Problem, verdict
from mtp_export.verify.context import Context
from mtp_export.verify.diagnosis.causes import copies
from mtp_export.verify.weights.cut_off import noted
from mtp_export.verify.weights.extents import run_words

if TYPE_CHECKING:
    import numpy as np

_FEW = 8  # rows or columns, which may have equal sizes by chance
_ALIKE = 2e-6  # of a mean square: what the order of a sum changes
_BY_CHANCE = -30.0  # the logarithm of how likely elements are that come again, of few values
_KEYS, _VALUES = ".k_proj.", ".v_proj."


class _Repeat(NamedTuple):
    """A run of rows, columns or elements, and the one before that it holds again."""

    axis: str
    again: range
    first: range


def run(context: Context) -> Iterator[Item]:
    """The linears and projections that the walk looked into, by the sizes of rows and columns, and
    the norms, by those of elements."""
    found, count, named = dict[str, _Repeat](), 0, context.named_tensors
    for fact in noted(context):
        spec, note = fact.weight.stored.weight, fact.note
        is_linear = spec.is_linear_weight or spec.role is Role.MTP_PROJECTION
        is_norm = spec.role is Role.NORM and len(spec.shape) == 1
        if note is None or not (is_norm or (is_linear and len(spec.shape) == 2)):
            continue
        if fact.weight.name in named:
            continue
        count += 1
        ways = {"elements": note.columns}
        if not is_norm:
            ways = {"rows": note.rows, "columns": note.columns}
        for axis, squares in ways.items():
            if fact.weight.name not in found and (repeat := _repeat(axis, squares)):
                found[fact.weight.name] = repeat
    problems = [Problem(name, _words(name, one)) for name, one in found.items()]
    wrong = [one for one in problems if not _are_heads(one.subject, found)]
    if count:
        yield verdict("no part of a weight twice", wrong, counted(count, "weight"))


def _words(name: str, repeat: _Repeat) -> str:
    again, first = (run_words(repeat.axis, part) for part in (repeat.again, repeat.first))
    return copies.part_repeated(name, again, first)


def _are_heads(name: str, found: dict[str, _Repeat]) -> bool:
    """Return whether rows are heads of keys and values that were repeated in both, as for more
    ranks than there are heads: the model computes the same."""
    for one, other in ((_KEYS, _VALUES), (_VALUES, _KEYS)):
        if one in name:
            return found.get(name.replace(one, other)) == found[name]
    return False


def _repeat(axis: str, squares: Sequence[float]) -> _Repeat | None:
    """Return the longest run of mean squares that come again, if it is no small part."""
    import numpy as np

    size, sizes = len(squares), np.asarray(squares)
    least = max(_FEW, gates.MOST_ZERO_RUN * size)
    if size < 2 * _FEW or not np.isfinite(sizes).all():
        return None
    logs = np.log(np.maximum(sizes, 1e-300))
    order = np.argsort(logs, kind="stable")
    is_pair = (np.diff(logs[order]) < _ALIKE) & (sizes[order[1:]] > 0)
    by = np.bincount(np.abs(np.diff(order))[is_pair])
    if not len(by) or by.max() < least:
        return None
    offset = int(by.argmax())
    again = (np.abs(logs[offset:] - logs[:-offset]) < _ALIKE) & (sizes[offset:] > 0)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], again, [0]])))
    start, stop = max(zip(edges[::2], edges[1::2], strict=True), key=lambda one: one[1] - one[0])
    if stop - start < least or np.ptp(logs[start:stop]) < _ALIKE:  # of one value: others tell
        return None
    if axis == "elements" and (stop - start) * _alike(logs) > _BY_CHANCE:
        return None
    first = range(int(start), int(stop))
    return _Repeat(axis, range(first.start + offset, first.stop + offset), first)


def _alike(logs: np.ndarray) -> float:
    """Return the logarithm of how likely two elements are of one size."""
    import numpy as np

    (_, counts) = np.unique(np.round(logs / _ALIKE), return_counts=True)
    return float(np.log(np.square(counts / len(logs)).sum()))
