"""Scales of channels that tools move between the weights of a layer (AWQ, SmoothQuant): they change
each of these and not what the layer computes, since what divides one multiplies another."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from mtp_checkpoints.weights.weight_values import WeightOnDisk
from mtp_export.verify.evidence.weight_facts import AgainstSource

_SAMPLED_ROWS = 1024  # that the scales of columns are fitted to
_ROUNDS = 8
_LEAST = 1e-30
_CONSTANT = 0.05  # median distance of scales from 1 that quantization noise may have
_INVERSE = 0.1  # median distance from 1 of products of scales that cancel each other
_FAR, _MOST_FAR = 0.5, 0.05  # distance that a small share of them may exceed: channels of few bits


@dataclass(frozen=True)
class Scaled:
    """A weight as its source's, row and column multiplied: rows [N], around 1, and columns [K].

    sqnr_db: the signal-to-noise ratio of the weight against that.
    """

    rows: torch.Tensor
    columns: torch.Tensor
    sqnr_db: float

    @property
    def has_rows(self) -> bool:
        return not _are_inverse(self.rows, torch.ones_like(self.rows), _CONSTANT)

    @property
    def has_columns(self) -> bool:
        return not _are_inverse(self.columns, torch.ones_like(self.columns), _CONSTANT)


@dataclass(frozen=True)
class LayerWeight:
    """A weight of a layer beside the source's. offset: what engines add to it, as to a norm's."""

    weight: WeightOnDisk
    against: AgainstSource
    offset: float = 0.0

    @property
    def is_matrix(self) -> bool:
        return len(self.weight.stored.weight.shape) == 2

    @cached_property
    def scaled(self) -> Scaled:
        """The scales of a matrix that fit it best. Raises ValueError where it cannot be decoded."""
        rows, columns = _fitted(*self._values(0, _stop(self.weight)))
        found, signal, noise = list[torch.Tensor](), 0.0, 0.0
        for start, stop in self.weight.pieces():
            own, source = self._values(start, stop)
            wanted = source * columns
            factors = (own * wanted).sum(1) / wanted.square().sum(1).clamp_min(_LEAST)
            found.append(factors)
            wanted *= factors[:, None]
            signal += float(wanted.double().square().sum())
            noise += float((own.double() - wanted.double()).square().sum())
        rows = torch.cat(found)
        middle = float(rows.median()) or 1.0
        level = 10 * math.log10(signal / noise) if signal and noise else math.inf if signal else 0.0
        return Scaled(rows / middle, columns * middle, level)

    @cached_property
    def factors(self) -> torch.Tensor:
        """The factors of a vector's elements."""
        own, source = self._values(0, self.weight.rows)
        return (own + self.offset) / (source + self.offset)

    def _values(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        own, source = (
            one.encoded(start, stop).dequantize().float()
            for one in (self.weight, self.against.source)
        )
        return own, source


def makes_up_for(own: LayerWeight, layer: Sequence[LayerWeight]) -> bool:
    """Return whether others of a layer undo the scales of a weight: columns that read a vector or
    rows undo those, and either undoes columns."""
    others = [one for one in layer if one is not own]
    if not own.is_matrix:
        module = own.weight.stored.weight.module
        of_rows = (one.scaled.rows for one in others if _is_weight_of(one, module))
        return any(_are_alike(own.factors, rows) for rows in of_rows) or any(
            _are_inverse(own.factors, columns) for columns in _columns(others)
        )
    found = own.scaled
    rows_undone = not found.has_rows or any(
        _are_inverse(found.rows, columns, relative=True) for columns in _columns(others)
    )
    if not rows_undone or not found.has_columns:
        return rows_undone
    vectors = (one.factors for one in others if not one.is_matrix)
    if any(_are_inverse(found.columns, one, relative=found.has_rows) for one in vectors):
        return True
    matrices = (one.scaled for one in others if one.is_matrix)
    return any(_are_inverse(found.columns, m.rows, relative=m.has_rows) for m in matrices)


def undoes(norm: LayerWeight, own: LayerWeight) -> bool:
    """Return whether the columns of a matrix undo the scales of a norm."""
    return _are_inverse(norm.factors, own.scaled.columns)


def _columns(layer: Sequence[LayerWeight]) -> Iterator[torch.Tensor]:
    return (one.scaled.columns for one in layer if one.is_matrix)


def _is_weight_of(one: LayerWeight, module: str) -> bool:
    return one.is_matrix and one.weight.stored.weight.module == module


def _are_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return len(one) == len(other) and _are_inverse(one, 1 / other, relative=True)


def _are_inverse(
    one: torch.Tensor, other: torch.Tensor, most: float = _INVERSE, *, relative: bool = False
) -> bool:
    """Return whether scales cancel each other; relative: but for one number. Those of keys and
    values go with several heads of queries each."""
    if len(other) > len(one) > 0 and len(other) % len(one) == 0:
        one, other = other, one
    if len(other) == 0 or len(one) % len(other):
        return False
    return any(
        _distance(one * spread, relative=relative) < most for spread in _spread(other, len(one))
    )


def _spread(scales: torch.Tensor, count: int) -> Iterator[torch.Tensor]:
    """Yield scales as so many, each head of a size repeated."""
    copies = count // len(scales)
    if copies == 1:
        yield scales
        return
    for head in (32, 64, 96, 128, 192, 256):
        if len(scales) % head == 0:
            yield scales.reshape(-1, 1, head).expand(-1, copies, -1).reshape(-1)


def _distance(products: torch.Tensor, *, relative: bool) -> float:
    finite = products[products.isfinite()]
    if not len(finite):
        return math.inf
    middle = float(finite.median()) if relative else 1.0
    if not middle:
        return math.inf
    far = (finite / middle - 1).abs()
    return float(far.median()) if float((far > _FAR).float().mean()) <= _MOST_FAR else math.inf


def _fitted(own: torch.Tensor, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales of rows and columns by which a matrix is its source's, least squares in
    turns."""
    products, squares = own * source, source.square()
    columns = torch.ones(own.shape[1])
    for _ in range(_ROUNDS):
        rows = (products @ columns) / (squares @ columns.square()).clamp_min(_LEAST)
        columns = (rows @ products) / (rows.square() @ squares).clamp_min(_LEAST)
    return rows, columns


def _stop(weight: WeightOnDisk) -> int:
    unit = max(1, weight.piece_rows(1))
    return min(weight.rows, -(-_SAMPLED_ROWS // unit) * unit)
