"""Where in a weight the elements of one kind lie, such as zeros: the rows and columns of the run
that a block which shows them is of, and the words for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mtp_checkpoints.weights.weight_values import WeightOnDisk
from mtp_export.verify.diagnosis.causes import parts_lost as causes

if TYPE_CHECKING:
    import torch

_ROWS = 32  # of a block that is found
_MOST = 0.5  # of a row or column of the run are of the kind; of others far fewer
_NEARLY_ALL = 0.9
_TENTH = 0.1
_FEW_ROWS = 8  # in which values may lie apart by chance
_TINY = 1e-19  # whose square is zero
_SHARES = {0.25: "a quarter", 0.5: "half", 0.75: "three quarters"}


@dataclass(frozen=True)
class Extent:
    """A run of rows and columns of a matrix [n, k]."""

    rows: range
    columns: range
    shape: tuple[int, int]

    @property
    def share(self) -> str:
        """The share of the matrix, such as "half"."""
        return share_words(len(self.rows) * len(self.columns) / (self.shape[0] * self.shape[1]))

    @property
    def place(self) -> str:
        """The rows and columns, those that are not all."""
        of_vector = self.shape[0] == 1
        axes = {"rows": self.rows, "elements" if of_vector else "columns": self.columns}
        sizes = dict(zip(axes, self.shape, strict=True))
        runs = [run_words(axis, run) for axis, run in axes.items() if len(run) < sizes[axis]]
        return ", ".join(runs) or "all elements"


def share_words(share: float) -> str:
    """Words for a share of a tensor."""
    return _SHARES.get(share, f"{share:.0%}" if share >= _TENTH else f"{share:.1%}")


def run_words(axis: str, run: range) -> str:
    """Words for a run. axis: rows, columns or elements."""
    if len(run) == 1:
        return f"{axis.removesuffix('s')} {run.start}"
    return f"{axis} {run.start} to {run.stop - 1}"


def zero_extent(weight: WeightOnDisk, row: int, column: int) -> Extent:
    """Return the rows and columns of a matrix that are zero, by the first of a block that is."""
    import torch

    pieces = [is_zero(weight.encoded(*rows).dequantize()) for rows in weight.pieces()]
    return extent_of(torch.cat(pieces), row, column)


def is_zero(values: torch.Tensor) -> torch.Tensor:
    """Return which values are zero, or as small as scales that were lost make them."""
    return values.float().abs() < _TINY


def extent_words(weight: WeightOnDisk, found: Extent) -> str:
    """Say that a part of a weight is zero."""
    scales: causes.Scales = "none"
    if weight.has_scales:
        scales = "zero" if bool((weight.scale.float() == 0).any()) else "apart"
    return _part_words(weight.name, found, scales)


def words_of(tensor: str, zeros: torch.Tensor, row: int, column: int, *, has_scales: bool) -> str:
    """The same of a mask [n, k] of the zeros of a tensor."""
    scales: causes.Scales = "apart" if has_scales else "none"
    return _part_words(tensor, extent_of(zeros, row, column), scales)


def _part_words(tensor: str, found: Extent, scales: causes.Scales) -> str:
    return causes.part_zero(tensor, found.place, found.share, found.shape, scales)


def not_finite_words(wrong: torch.Tensor, *, huge: bool = False) -> str:
    """Say where values are not finite, by the mask [n, k] or [k] of these. huge: some are finite,
    and larger than any weight is."""
    wrong = wrong.flatten(1) if wrong.dim() > 1 else wrong[None]
    count, first = int(wrong.count_nonzero()), wrong.nonzero()[0].tolist()
    found = extent_of(wrong, *first)
    inside = wrong[found.rows.start : found.rows.stop, found.columns.start : found.columns.stop]
    if inside.float().mean() >= _MOST and inside.sum() >= _NEARLY_ALL * count > _NEARLY_ALL:
        return causes.not_finite(count, f"in {found.place}, {found.share} of it", huge=huge)
    rows = wrong.any(1).nonzero().flatten().tolist()
    if len(rows) > _FEW_ROWS and rows[-1] - rows[0] + 1 < len(wrong):
        return causes.not_finite(
            count, f"all in {run_words('rows', range(rows[0], rows[-1] + 1))}", huge=huge
        )
    where = f"row {first[0]}" if len(wrong) > 1 else f"element {first[1]}"
    return causes.not_finite(count, f"the first in {where}", huge=huge)


def extent_of(is_so: torch.Tensor, row: int, column: int, block: int = _ROWS) -> Extent:
    """Return the run of rows and columns of a mask [n, k] that a block of it is of, by its first
    row and column."""
    columns = _run(is_so[row : row + block], 0, column)
    rows = _run(is_so[:, columns.start : columns.stop], 1, row)
    return Extent(rows, _run(is_so[rows.start : rows.stop], 0, column), (*is_so.shape,))


def _run(is_so: torch.Tensor, over: int, first: int) -> range:
    """Return the run of columns (over 0) or rows (over 1) of a mask that are mostly so, around the
    first such one from a place on."""
    are = (is_so.numpy().mean(over) >= _MOST).tolist()  # torch copies a mask to floats
    start = next((at for at in range(first, len(are)) if are[at]), first)
    stop = start + 1
    while start > 0 and are[start - 1]:
        start -= 1
    while stop < len(are) and are[stop]:
        stop += 1
    return range(start, stop)
