"""Sketches of the rows and columns of a weight and of its source, from one read of both: random
projections, which survive rounding to a format, and sums, from which multiples follow exactly."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

import torch

from mtp_checkpoints.weights.weight_values import WeightOnDisk

# Projections per row or column. The nearest of 100,000 unrelated rows is at a quarter of the mean
# squared distance; a row that was rounded to 4 bits lies at a hundredth of it.
_PROJECTIONS = 16
_PIECE_ELEMENTS = 1 << 21
_CORNER_ELEMENTS = 1 << 18


@dataclass(frozen=True)
class Sums:
    """Sums over the elements w of the source and f of the weight, of each row or column [n] in
    float64."""

    w: torch.Tensor
    f: torch.Tensor
    ww: torch.Tensor
    ff: torch.Tensor
    wf: torch.Tensor
    noise: torch.Tensor  # Σ(f - w)²

    @classmethod
    def both(cls, wanted: torch.Tensor, found: torch.Tensor) -> tuple[Sums, Sums]:
        """Return the sums of the rows and of the columns of values of one shape."""
        noise = (found - wanted).square_()
        parts = (wanted, found, wanted.square(), found.square(), wanted * found, noise)
        of_rows, of_columns = ([part.sum(axis).double() for part in parts] for axis in (1, 0))
        return cls(*of_rows), cls(*of_columns)

    def __add__(self, other: Sums) -> Sums:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Sums(*(one + another for one, another in pairs))

    @classmethod
    def joined(cls, pieces: list[Sums]) -> Sums:
        """Return the sums of all rows, from those of pieces."""
        columns = zip(*(vars(piece).values() for piece in pieces), strict=True)
        return cls(*(torch.cat(one) for one in columns))

    def select(self, chosen: torch.Tensor) -> Sums:
        """Return the sums of some rows or columns, by index or mask."""
        return Sums(*(one[chosen] for one in vars(self).values()))

    @property
    def total(self) -> Sums:
        """The sums over all elements."""
        return Sums(*(one.sum() for one in vars(self).values()))


@dataclass(frozen=True)
class Axis:
    """Rows or columns: sketches [n, m] of the weight's and the source's, and their sums. elements:
    the number of elements of each."""

    noun: str
    elements: int
    found: torch.Tensor
    wanted: torch.Tensor
    sums: Sums

    @property
    def count(self) -> int:
        return len(self.found)


@dataclass(frozen=True)
class Sketches:
    """Of a weight and its source, seen as matrices: axes before the last are rows.

    A vector has rows of one element, which are their own sketches, and no columns. corners: the
    first columns of both, in as many rows as the weight has.
    """

    rows: Axis
    columns: Axis | None
    corners: tuple[torch.Tensor, torch.Tensor] = field(repr=False)

    @cached_property
    def total(self) -> Sums:
        return self.rows.sums.total

    @property
    def elements(self) -> int:
        return self.rows.count * self.rows.elements

    @cached_property
    def level_db(self) -> float:
        """SQNR of the weight as it is, of the source's values."""
        signal, noise = float(self.total.ww), float(self.total.noise)
        if noise == 0:
            return math.inf
        share = signal / noise
        return 10 * math.log10(share) if 0 < share < math.inf else -math.inf


def values(weight: WeightOnDisk, start: int, stop: int) -> torch.Tensor:
    """Return rows [start, stop) of a weight's first axis as a float32 matrix.

    Raises ValueError for codes without a value.
    """
    read = weight.encoded(start, stop).dequantize().float()
    return read[:, None] if read.ndim == 1 else read.flatten(0, -2)


def sketched(weight: WeightOnDisk, source: WeightOnDisk) -> Sketches:
    """Return the sketches of a weight and of its source, of one shape, from one read of each.

    Raises ValueError for codes without a value.
    """
    *_, columns = shape = weight.stored.weight.shape
    if len(shape) == 1 or math.prod(shape) == max(shape):
        return _of_vectors(weight, source)
    rows = math.prod(shape) // columns
    across, along = projection(columns), projection(rows)
    by_row: list[Sums] = []
    by_column: list[Sums] = []
    row_sketches: list[tuple[torch.Tensor, torch.Tensor]] = []
    found_columns, wanted_columns = (torch.zeros(columns, _PROJECTIONS) for _ in range(2))
    corners: list[tuple[torch.Tensor, torch.Tensor]] = []
    corner, done = max(1, min(columns, _CORNER_ELEMENTS // rows)), 0
    for start, stop in _pieces(weight, source):
        found, wanted = (values(one, start, stop) for one in (weight, source))
        own = along[done : done + len(found)]
        done += len(found)
        row_sketches.append((found @ across, wanted @ across))
        found_columns += found.t() @ own
        wanted_columns += wanted.t() @ own
        corners.append((found[:, :corner].clone(), wanted[:, :corner].clone()))
        of_rows, of_columns = Sums.both(wanted, found)
        by_row.append(of_rows)
        by_column = [by_column[0] + of_columns] if by_column else [of_columns]
    found_rows, wanted_rows = map(torch.cat, zip(*row_sketches, strict=True))
    our_corner, their_corner = map(torch.cat, zip(*corners, strict=True))
    return Sketches(
        Axis("row", columns, found_rows, wanted_rows, Sums.joined(by_row)),
        Axis("column", rows, found_columns, wanted_columns, by_column[0]),
        (our_corner, their_corner),
    )


def _of_vectors(weight: WeightOnDisk, source: WeightOnDisk) -> Sketches:
    rows = weight.stored.weight.shape[0]
    found, wanted = (values(one, 0, rows).reshape(-1, 1) for one in (weight, source))
    axis = Axis("element", 1, found, wanted, Sums.both(wanted, found)[0])
    return Sketches(axis, None, (found, wanted))


def _pieces(weight: WeightOnDisk, source: WeightOnDisk) -> list[tuple[int, int]]:
    """Row ranges to read; one where either is read whole whatever is asked for."""
    whole = any(one.stored.transposed or one.stored.format.reads_whole for one in (weight, source))
    return [(0, weight.rows)] if whole else list(weight.pieces(_PIECE_ELEMENTS))


def projection(size: int) -> torch.Tensor:
    """Return random projections [size, m], the same for every axis of a size: rows of a transposed
    matrix have the sketches of the columns that they were."""
    generator = torch.Generator().manual_seed(size)
    return torch.randn(size, _PROJECTIONS, generator=generator)
