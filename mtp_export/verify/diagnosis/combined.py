"""Two relations of a weight to its source's at once: an order and a factor, orders of both axes, a
factor for each row or column."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch

from mtp_export.verify.diagnosis.causes import relations as causes
from mtp_export.verify.diagnosis.causes import weights as weight_causes
from mtp_export.verify.diagnosis.compared import Compared
from mtp_export.verify.diagnosis.factors import Relation, ratios, shown, signed
from mtp_export.verify.diagnosis.orders import Subject, find_order, noise_of
from mtp_export.verify.diagnosis.sketches import Axis, projection, values

_SORTED_ELEMENTS = 1 << 24  # of weights whose rows are sorted, to match them in any order
_PLAIN = 0.01  # a factor nearer to one is none
_LEAST_EACH = 4  # elements of a row or column whose factor is of no known vector
_LEAST_ALIKE = 0.3  # noise of a weight to which offsets were added, of the source's squares
_SAME_FACTORS = 0.02  # spread of the quotients of factors and the vector that they are


def of_order_and_factor(compared: Compared, most_noise: float) -> Iterator[Relation]:
    """Yield orders of rows, columns or elements that are the source's with one factor."""
    sketches = compared.sketches
    size = math.sqrt(float(sketches.total.ff) / max(float(sketches.total.ww), 1e-30))
    factors = [-1.0] if abs(size - 1) <= _PLAIN or not size else [size, -size]
    for factor in factors:
        words = shown(factor, most_noise)
        other = weight_causes.SIGN_FLIPPED if words == "-1" else causes.multiple(words)
        for axis in filter(None, (sketches.rows, sketches.columns)):
            subject = Subject.all_of(axis.noun, compared.head_on(axis))
            order = find_order(axis.found / factor, axis.wanted, subject, most_noise)
            if order is not None:
                yield Relation(causes.both(order.words, other), order.noise)
        rows, columns = sketches.rows, sketches.columns
        if columns is not None and rows.count == columns.count:
            signal = max(float(columns.wanted.square().sum()), 1e-30)
            noise = noise_of(rows.found / factor, columns.wanted) / signal
            if noise <= most_noise:
                yield Relation(causes.both(weight_causes.TRANSPOSED, other), noise)


def of_order_and_offset(compared: Compared, most_noise: float) -> Iterator[Relation]:
    """Yield orders of rows, columns or elements that are the source's with an offset."""
    sketches = compared.sketches
    offset = float(sketches.total.f - sketches.total.w) / sketches.elements
    if sketches.elements * offset**2 <= most_noise * float(sketches.total.ww):
        return
    other = causes.plus(signed(offset, most_noise))
    most = most_noise * max(1.0, float(sketches.total.ff) / max(float(sketches.total.ww), 1e-30))
    for axis in filter(None, (sketches.rows, sketches.columns)):
        subject = Subject.all_of(axis.noun, compared.head_on(axis))
        without = axis.found - axis.found.mean(0) + axis.wanted.mean(0)
        order = find_order(without, axis.wanted, subject, most)
        if order is not None:
            yield Relation(causes.both(order.words, other), order.noise * most_noise / most)


def of_both_axes(compared: Compared, most_noise: float) -> Iterator[Relation]:
    """Yield an order of rows together with one of columns: rows are matched by their values in
    ascending order, whatever column these are in."""
    shape = compared.weight.stored.weight.shape
    if len(shape) != 2 or min(shape) < 2 or math.prod(shape) > _SORTED_ELEMENTS:
        return
    found, wanted = (values(one, 0, one.rows) for one in (compared.weight, compared.source))
    across, along = projection(shape[1]), projection(shape[0])
    ours, theirs = (one.sort(1)[0] @ across for one in (found, wanted))
    rows = find_order(ours, theirs, Subject.all_of("row", compared.head), 1.0)
    if rows is None:
        return
    columns = find_order(
        found.t() @ along,
        wanted[rows.places].t() @ along,
        Subject.all_of("column", None),
        most_noise,
    )
    if columns is not None:
        yield Relation(causes.both(rows.words, columns.words), columns.noise)


def of_each(
    compared: Compared, most_noise: float, vectors: Mapping[str, torch.Tensor]
) -> Iterator[Relation]:
    """Yield that each row or column has a factor of its own; vectors, by the names of tensors, are
    those that may have been multiplied in."""
    for axis in filter(None, (compared.sketches.columns, compared.sketches.rows)):
        factors = ratios(axis, most_noise)
        if factors is None or axis.count < 2 or bool(factors.isnan().any()):
            continue
        sums = axis.sums
        noise = float((sums.ff / factors**2 - 2 * sums.wf / factors + sums.ww).sum())
        share = max(0.0, noise) / float(sums.ww.sum())
        low, high = (shown(float(one), most_noise) for one in (factors.min(), factors.max()))
        vector = _vector(axis, factors, vectors)
        is_known = axis.elements >= _LEAST_EACH or vector
        if share <= most_noise and low != high and is_known:
            yield Relation(causes.each_multiplied(axis.noun, low, high, vector), share)


def of_each_offset(compared: Compared, most_noise: float) -> Iterator[Relation]:
    """Yield that each row or column is the source's plus an offset of its own."""
    for axis in filter(None, (compared.sketches.columns, compared.sketches.rows)):
        if axis.elements < _LEAST_EACH or axis.count < 2:
            continue
        sums = axis.sums
        offsets = (sums.f - sums.w) / axis.elements
        noise = float((sums.noise - axis.elements * offsets.square()).sum())
        low, high = (f"{float(one):.3g}" for one in (offsets.min(), offsets.max()))
        squares = float(sums.ww.sum())
        if noise <= _LEAST_ALIKE * squares:
            share = max(0.0, noise) / max(squares, float(sums.ff.sum()))
            yield Relation(causes.each_offset(axis.noun, low, high), share)


def _vector(axis: Axis, factors: torch.Tensor, vectors: Mapping[str, torch.Tensor]) -> str:
    """The vector that the factors are, but for one factor; "" if they are none of these."""
    for name, vector in vectors.items():
        if len(vector) != axis.count:
            continue
        for words, one in ((name, vector), (causes.reciprocal_of(name), 1 / vector)):
            quotients = factors / one.double()
            if bool(((quotients / quotients.median() - 1).abs() <= _SAME_FACTORS).all()):
                return words
    return ""
