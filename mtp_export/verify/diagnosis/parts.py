"""Parts of a weight that are its source's where others are not, or that are at other places."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from mtp_checkpoints.weights.weight_values import WeightOnDisk
from mtp_export.verify.diagnosis.causes import relations as causes
from mtp_export.verify.diagnosis.compared import WINDOW_ROWS, Compared, share_of
from mtp_export.verify.diagnosis.factors import Relation
from mtp_export.verify.diagnosis.orders import nearest, noise_of
from mtp_export.verify.diagnosis.sketches import Axis, values

_MOST_DAMAGED = 0.75  # of the rows or columns: more in common is needed to say what is not
_NEAR_NOISE = 0.06  # of a row that is another: rounding to 4 bits leaves a fifth of it
_LEAST_MOVED = 0.2  # of the rows or columns
_LEAST_COUNT = 8
_LOST_NOISE = 0.5  # of a row's squares, in a weight that is the source's within a bound
_LOST_SHARE = 0.2  # of the noise, at least, that they make
_APART = 10.0  # ratio of the noise of what differs to that of what does not


def part(compared: Compared, others: Iterable[WeightOnDisk] = ()) -> str | None:
    """Return a sentence that names the one range of rows or columns that is not the source's, None
    where there is none. others: weights of its shape, which that range may be of."""
    for axis in filter(None, (compared.sketches.rows, compared.sketches.columns)):
        shares = axis.sums.noise / axis.sums.ww.clamp_min(1e-30)
        differs = shares > 4 * compared.most_noise
        places = differs.nonzero()[:, 0]
        if axis.elements == 1 or not 0 < len(places) <= _MOST_DAMAGED * axis.count:
            continue
        first, last = int(places[0]), int(places[-1])
        apart = shares[differs].min() >= _APART * shares[~differs].max()
        if last - first + 1 != len(places) or not bool(apart):
            continue
        if (start := _written_twice(axis, first, last)) is not None:
            return causes.part_written_twice(axis.noun, first, last, start)
        if (other := _of_another(compared, axis, first, last, others)) is not None:
            return causes.part_of_another(axis.noun, first, last, other)
        return causes.part_differs(axis.noun, first, last, axis.count)
    return None


def lost(compared: Compared) -> str | None:
    """Return a sentence that names rows or columns that are not the source's in a weight that is as
    a whole: two that are exchanged, or one range. None where there are none."""
    for axis in filter(None, (compared.sketches.rows, compared.sketches.columns)):
        sums = axis.sums
        shares = sums.noise / sums.ww.clamp_min(1e-9 * float(sums.ww.mean()))
        places = (shares > max(_LOST_NOISE, _APART * float(shares.median()))).nonzero()[:, 0]
        if axis.elements < _LEAST_COUNT or not len(places):
            continue
        if sums.noise[places].sum() < _LOST_SHARE * sums.noise.sum():
            continue
        first, last = int(places[0]), int(places[-1])
        ours, theirs = axis.found[places], axis.wanted[places.flip(0)]
        if len(places) == 2 and share_of(theirs, ours) < _LOST_NOISE:
            return causes.two_exchanged(causes.its(axis.noun), first, last)
        if last - first + 1 == len(places):
            return causes.part_differs(axis.noun, first, last, axis.count)
        return causes.some_differ(axis.noun, len(places), axis.count)
    return None


def _of_another(
    compared: Compared, axis: Axis, first: int, last: int, others: Iterable[WeightOnDisk]
) -> str | None:
    """The weight whose rows or columns a range is of, None if it is of no other."""
    of_rows = axis is compared.sketches.rows
    start = first // WINDOW_ROWS * WINDOW_ROWS if of_rows else 0
    stop = min(start + WINDOW_ROWS, compared.weight.rows)
    if len(compared.weight.stored.weight.shape) > 2:
        return None
    rows = slice(first - start, last + 1 - start) if of_rows else slice(None)
    columns = slice(None) if of_rows else slice(first, last + 1)
    found = values(compared.weight, start, stop)[rows, columns]
    within = 10 ** (-compared.weight.stored.format.gate.sqnr_db / 10)
    for other in others:
        if share_of(values(other, start, stop)[rows, columns], found) <= within:
            return other.stored.weight.name
    return None


def _written_twice(axis: Axis, first: int, last: int) -> int | None:
    """The first of the source's rows that a range of rows holds, None if it holds none."""
    far = (axis.wanted - axis.found[first]).square().sum(1)
    start = int(far.argmin())
    theirs = axis.wanted[start : start + last - first + 1]
    ours = axis.found[first : last + 1]
    if start == first or theirs.shape != ours.shape or share_of(theirs, ours) > _NEAR_NOISE:
        return None
    return start


def moved_rows(compared: Compared) -> str | None:
    """Return a sentence for a weight of which some rows or columns are the source's elsewhere, None
    where too few are."""
    for axis in filter(None, (compared.sketches.rows, compared.sketches.columns)):
        if axis.elements < _LEAST_COUNT or axis.count < _LEAST_COUNT:
            continue
        middle = axis.wanted.mean(0)
        found, wanted = axis.found - middle, axis.wanted - middle
        places = nearest(found, wanted)
        near = places >= 0
        far = (found - wanted[places.clamp_min(0)]).square().sum(1)
        near &= far <= _NEAR_NOISE * wanted[places.clamp_min(0)].square().sum(1)
        moved = near & (places != torch.arange(axis.count))
        if int(moved.sum()) >= _LEAST_MOVED * axis.count:
            return _moved_words(axis, places, near)
    return None


def _moved_words(axis: Axis, places: torch.Tensor, near: torch.Tensor) -> str:
    """near: the rows whose places are known."""
    by = (torch.arange(axis.count) - places)[near]
    lost = axis.count - int(near.sum())
    if bool((by == by[0]).all()) and lost <= abs(int(by[0])):
        return causes.shifted(axis.noun, int(by[0]), lost)
    kept = len(set(places[near].tolist()))
    return causes.some_of_the_sources(axis.noun, int(near.sum()), kept, axis.count)


def of_an_offset(compared: Compared, _: float) -> Iterator[Relation]:
    """Yield that elements lie some places from their own, across the ends of rows."""
    found, wanted = (one.reshape(-1).double() for one in compared.first_rows)
    squares = float(wanted.square().sum())
    found, wanted = found - wanted.mean(), wanted - wanted.mean()
    count, columns = len(found), compared.sketches.rows.elements
    ours, theirs = (torch.fft.rfft(one, n=2 * count) for one in (found, wanted))
    by = int(torch.fft.irfft(ours * theirs.conj(), n=2 * count).argmax())
    by = by - 2 * count if by > count else by
    if not by or abs(by) > count // 2:
        return
    ours, theirs = (found[by:], wanted[:-by]) if by > 0 else (found[:by], wanted[-by:])
    if share_of(theirs, ours) > _NEAR_NOISE:
        return
    noise = noise_of(ours, theirs) / squares
    ends = (found[:by], wanted[-by:]) if by > 0 else (found[by:], wanted[:-by])
    if columns == 1 and share_of(ends[1], ends[0]) > _NEAR_NOISE:  # else it is rolled
        yield Relation(causes.shifted("element", by, abs(by)), noise)
    elif by % columns:
        yield Relation(causes.at_an_offset(by), noise)
