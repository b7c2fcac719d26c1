"""Relation of a weight to its source's where they differ: the same in another order, with factors
or an offset, transposed, or in part. Relations are found from sketches, which one read of both
makes, and orders confirmed on values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from mtp_checkpoints.weights.weight_values import WeightOnDisk
from mtp_export.verify.diagnosis import factors
from mtp_export.verify.diagnosis.causes import relations as causes
from mtp_export.verify.diagnosis.causes import weights as weight_causes
from mtp_export.verify.diagnosis.combined import (
    of_both_axes,
    of_each,
    of_each_offset,
    of_order_and_factor,
    of_order_and_offset,
)
from mtp_export.verify.diagnosis.compared import LEAST_NOISE, WINDOW_ROWS, Compared, share_of
from mtp_export.verify.diagnosis.differences import of_rank, of_rounding
from mtp_export.verify.diagnosis.factors import Relation
from mtp_export.verify.diagnosis.functions import of_functions, of_limits, of_zeros
from mtp_export.verify.diagnosis.orders import Order, Subject, find_order, noise_of
from mtp_export.verify.diagnosis.parts import moved_rows, of_an_offset, part
from mtp_export.verify.diagnosis.sketches import Axis, values

_HALF = 0.5  # of the difference: a relation that leaves more explains nothing
_EQUALLY = 2.0  # noise of two relations that explain equally
_LOOSE_NOISE = 0.25  # of codes that moved while their scales stayed
_WINDOWS = 4
_WHOLE_ELEMENTS = 1 << 26


def relation(compared: Compared) -> str | None:
    """Return the relation of a weight to its source's in a sentence, None where there is none."""
    if compared.noise == 0:
        return None
    if not math.isfinite(compared.noise):  # other bits than floats, whose squares mean nothing
        bits = _first(of_functions(compared, 0.0), 0.0)
        return None if bits is None else bits.words
    most = min(compared.most_noise, _HALF * compared.noise)
    found = [one for kind in _KINDS if (one := _first(kind(compared, most), most)) is not None]
    if found:
        return _best(found).words
    ours, theirs = (
        one / one.norm(dim=1, keepdim=True).clamp_min(1e-30)  # whatever their scales
        for one in (compared.sketches.rows.found, compared.sketches.rows.wanted)
    )
    order = find_order(ours, theirs, Subject.all_of("row", compared.head), _LOOSE_NOISE)
    alone = None if order is None else _codes_alone(compared, order)
    if alone is not None and alone.noise <= most:
        return alone.words
    for two in (of_order_and_factor, of_order_and_offset, of_both_axes):
        if (one := _first(two(compared, most), most)) is not None:
            return one.words
    return None


def partly(
    compared: Compared, others: Sequence[WeightOnDisk], vectors: Mapping[str, torch.Tensor]
) -> str | None:
    """Return a sentence for a weight without a relation that has much in common with its source's:
    a part of it, its rows at other places, a difference of low rank or by rounding, a factor for
    each row or column. None for others. others: weights of its shape, which a part may be of.
    vectors: those that may have been multiplied into it, by name."""
    if not math.isfinite(compared.noise):
        return None
    most = min(compared.most_noise, _HALF * compared.noise)
    for words in (part(compared, others), moved_rows(compared)):
        if words is not None:
            return words
    kinds = (
        of_each(compared, most, vectors),
        of_each_offset(compared, most),
        of_rank(compared, most),
        of_rounding(compared),
    )
    found = next((one for kind in kinds if (one := _first(kind, most)) is not None), None)
    return None if found is None else found.words


def _best(found: Sequence[Relation]) -> Relation:
    """The relation that leaves least noise, with another that leaves no more to speak of."""
    best, *others = sorted(found, key=lambda one: one.noise)
    equal = [one for one in others if one.noise <= _EQUALLY * best.noise + LEAST_NOISE]
    if not equal:
        return best
    return Relation(causes.explained_equally(best.words, equal[0].words), best.noise)


def _first(found: Iterator[Relation], most_noise: float) -> Relation | None:
    return next((one for one in found if one.noise <= most_noise), None)


def _of_order(compared: Compared, most_noise: float) -> Iterator[Relation]:
    """The same rows, columns or elements in another order."""
    sketches = compared.sketches
    for axis in filter(None, (sketches.rows, sketches.columns)):
        order = _order(compared, axis, most_noise)
        if order is not None and _confirmed(compared, axis, order.places, most_noise):
            alone = _codes_alone(compared, order) if axis is sketches.rows else None
            if alone is not None and _EQUALLY * alone.noise < order.noise:
                yield alone
            else:
                yield Relation(_order_words(compared, axis, order), order.noise)


def _order(compared: Compared, axis: Axis, most_noise: float) -> Order | None:
    subject = Subject.all_of(axis.noun, compared.head_on(axis))
    return find_order(axis.found, axis.wanted, subject, most_noise)


def _order_words(compared: Compared, axis: Axis, order: Order) -> str:
    """The order's clause, or a sentence that knows what the weight's rows and columns are."""
    halves = causes.halves_swapped(causes.its(axis.noun))
    if order.words == halves:
        return {
            "row": weight_causes.ROW_HALVES_SWAPPED,
            "column": weight_causes.COLUMN_HALVES_SWAPPED,
        }.get(axis.noun, halves)
    reverse = causes.reverse_order(causes.its("column"))
    if order.words == reverse and len(compared.source.stored.weight.shape) == 3:
        return weight_causes.LAST_AXIS_REVERSED
    return order.words


def _confirmed(compared: Compared, axis: Axis, places: torch.Tensor, most_noise: float) -> bool:
    """True if the values of some rows are those of an order of rows or columns."""
    if axis.elements == 1 or len(compared.weight.stored.weight.shape) > 2:
        return True
    rows = compared.weight.rows
    starts = list(range(0, rows, WINDOW_ROWS))
    for start in starts[:: max(1, len(starts) // _WINDOWS)][:_WINDOWS]:
        found = values(compared.weight, start, min(start + WINDOW_ROWS, rows))
        if axis is compared.sketches.columns:
            wanted = values(compared.source, start, start + len(found))[:, places]
        else:
            found, sources = found[:1], places[start : start + 1].tolist()
            wanted = torch.cat([_row(compared.source, one) for one in sources])
        if noise_of(found, wanted) > 4 * most_noise * float(wanted.square().sum()):
            return False
    return True


def _row(weight: WeightOnDisk, row: int) -> torch.Tensor:
    start = row // WINDOW_ROWS * WINDOW_ROWS
    stop = min(start + WINDOW_ROWS, weight.rows)
    return values(weight, start, stop)[row - start : row - start + 1]


def _transposed(compared: Compared, most_noise: float) -> Iterator[Relation]:
    """Rows for columns: in the shape that this gives, in the shape as it was, or by blocks."""
    rows, columns = compared.sketches.rows, compared.sketches.columns
    if columns is None:
        return
    if rows.count == columns.count:
        signal = float(columns.wanted.square().sum())
        noise = noise_of(rows.found, columns.wanted) / max(signal, 1e-30)
        if noise <= most_noise:
            yield Relation(weight_causes.TRANSPOSED, noise)
        elif order := find_order(
            rows.found, columns.wanted, Subject.all_of("row", None), most_noise
        ):
            yield Relation(causes.transposed_and(order.words), order.noise)
    else:
        yield from _order_of_columns(compared)
    yield from _blocks_transposed(compared)


def _order_of_columns(compared: Compared) -> Iterator[Relation]:
    """Elements column by column in rows of the old length, as far as the corners go."""
    found, wanted = compared.sketches.corners
    rows, columns = compared.sketches.rows.count, compared.sketches.rows.elements
    whole, theirs = (one.reshape(-1) for one in compared.first_rows)
    assert len(found) == rows
    for corner, flat in ((wanted, whole), (found, theirs)):
        by_column = corner[:, : max(1, min(columns, len(flat) // rows))].t().reshape(-1)
        count = min(len(by_column), len(flat))
        yield Relation(causes.ORDER_OF_COLUMNS, share_of(by_column[:count], flat[:count]))


def _blocks_transposed(compared: Compared) -> Iterator[Relation]:
    found, wanted = compared.sample
    rows, columns = found.shape
    for size in (128, 64, 32, 16, 8, 4):
        if rows % size == 0 and columns % size == 0 and (rows, columns) != (size, size):
            blocks = found.view(rows // size, size, columns // size, size)
            turned = blocks.transpose(1, 3).reshape(rows, columns)
            yield Relation(causes.blocks_transposed(size), share_of(wanted, turned))


def _of_values(compared: Compared, most_noise: float) -> Iterator[Relation]:
    """The same places with factors, an offset, or a function of each element."""
    sketches = compared.sketches
    whole = list(factors.of_the_whole(sketches, most_noise))
    if whole or (whole := list(of_functions(compared, most_noise))):
        yield _best(whole)
    yield from of_limits(compared, most_noise)
    yield from factors.of_both(sketches, most_noise)
    yield from factors.of_parts(sketches, most_noise, other_scales=compared.other_scales)
    yield from of_zeros(compared, most_noise)


_KINDS = (_of_order, _transposed, _of_values, of_an_offset)


def _codes_alone(compared: Compared, order: Order) -> Relation | None:
    """The relation if rows of codes are in an order, and their scales are not."""
    weight, source = compared.weight, compared.source
    if len(weight.tensors) == 1 or compared.sketches.elements > _WHOLE_ELEMENTS:
        return None
    raw = weight.encoded(0, weight.rows)
    if len(raw.codes) != len(order.places):
        return None
    codes = raw.codes.view(torch.uint8)[order.places.argsort()].view(raw.codes.dtype)
    restored = replace(raw, codes=codes).dequantize().float()
    wanted = values(source, 0, source.rows)
    return Relation(causes.codes_alone(order.words), share_of(wanted, restored))
