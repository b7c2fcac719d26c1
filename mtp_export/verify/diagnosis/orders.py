"""The order in which the rows, columns or elements of a weight are its source's, by their sketches:
found by the nearest source of each, and named by the simplest rule that gives the same order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from mtp_export.verify.diagnosis.causes import relations as causes

_DISTANCES = 1 << 24  # that are in memory at a time
# A source is a row's if its squared distance is within this share of the row's square, and of the
# second nearest's. Scales that stayed while codes moved leave a tenth.
_NEAR = 0.3
_EXACT = 1e-6  # of a row's square, of a copy whose sketch was summed in another order
_BESIDE = 2
_SAMPLE = 512  # rows that are compared with all, before all are
_LEAST_MATCHED = 0.05  # of them
_MATCHED = 0.9  # of the rows, where the others are alike or zero
_LEAST_BLOCK = 4  # elements of a vector: shorter pieces of it may occur twice


@dataclass(frozen=True)
class Order:
    """An order: places [n], the source's index of each; noise, what is left of the weight's
    difference as a share of the source's squares; words, the clause that names it."""

    places: torch.Tensor
    noise: float
    words: str


@dataclass(frozen=True)
class Subject:
    """Subject of a clause, of, such as "its rows". noun: one of them. head: the number of rows of a
    head, where it is known."""

    noun: str
    of: str
    head: int | None = None

    @classmethod
    def all_of(cls, noun: str, head: int | None) -> Subject:
        return cls(noun, causes.its(noun), head)


def find_order(
    found: torch.Tensor, wanted: torch.Tensor, subject: Subject, most_noise: float
) -> Order | None:
    """Return the order in which found [n, m] is wanted [n, m] within a noise; None if there is none
    but the one that they have. most_noise: a share of the squares of wanted."""
    if len(found) < 2:
        return None
    squares = max(float(wanted.square().sum(dtype=torch.float64)), 1e-30)
    middle = wanted.mean(0)  # what all have in common tells none from another
    found, wanted = found - middle, wanted - middle
    varying = float(wanted.square().sum(dtype=torch.float64))
    plain = noise_of(found, wanted)
    if not plain:
        return None
    most = min(most_noise * squares, plain / 2, _NEAR * varying)
    for places in _candidates(found, wanted):
        noise = noise_of(found, wanted[places])
        if noise <= most:
            return Order(places, noise / squares, clause(places, subject))
    return None


def noise_of(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the sum of the squared differences."""
    return float((found - wanted).square().sum(dtype=torch.float64))


def _candidates(found: torch.Tensor, wanted: torch.Tensor) -> Iterator[torch.Tensor]:
    """Orders that may be the weight's, the simplest first."""
    count = len(found)
    every = torch.arange(count)
    yield every.flip(0)
    yield every.roll(_best_roll(found, wanted))
    for parts in divisors(count):
        yield every.view(parts, -1).t().reshape(-1)
    if found.shape[1] > 1:
        yield from _completed(nearest(found, wanted))
        return
    for size in reversed(divisors(count)):
        if size >= _LEAST_BLOCK:
            blocks = nearest(found.view(-1, size), wanted.view(-1, size))
            for order in _completed(blocks):
                yield (order[:, None] * size + torch.arange(size)).reshape(-1)
    for size in divisors(count):
        if count // size >= _LEAST_BLOCK:
            kinds = nearest(found.view(-1, size).t(), wanted.view(-1, size).t())
            for order in _completed(kinds):
                yield (torch.arange(0, count, size)[:, None] + order).reshape(-1)
    ours, theirs = (one.bfloat16().float()[:, 0] for one in (found, wanted))
    if torch.equal(ours.sort()[0], theirs.sort()[0]):
        by_value, moved = every.clone(), (ours != theirs).nonzero()[:, 0]
        by_value[moved[ours[moved].argsort(stable=True)]] = moved[
            theirs[moved].argsort(stable=True)
        ]
        yield by_value


def _completed(places: torch.Tensor) -> Iterator[torch.Tensor]:
    """The order that nearest sources make. Those without one go on from the one before or back from
    the one behind, and otherwise keep what is left, in its order."""
    unmatched = (places < 0).nonzero()[:, 0].tolist()
    if len(unmatched) > (1 - _MATCHED) * len(places):
        return
    order = places.tolist()
    left = set(range(len(order))) - set(order)
    if len(left) != len(unmatched):  # some source is at several places
        return
    for indices, beside, step in ((unmatched, -1, 1), (unmatched[::-1], 1, -1)):
        for index in indices:
            near = index + beside
            if order[index] < 0 and 0 <= near < len(order) and order[near] + step in left:
                order[index] = order[near] + step
                left.remove(order[index])
    rest = iter(sorted(left))
    yield torch.tensor([next(rest) if place < 0 else place for place in order])


def _best_roll(found: torch.Tensor, wanted: torch.Tensor) -> int:
    """The number of places by which wanted is rolled to be nearest to found."""
    ours, theirs = (torch.fft.rfft(one - one.mean(0), dim=0) for one in (found, wanted))
    match = torch.fft.irfft((ours * theirs.conj()).sum(1), n=len(found))
    return int(match.argmax())


def nearest(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Return the index of the row of wanted [k, m] that each row of found [n, m] is, -1 where none,
    or more than one, is near. A row that is near the one at its own place is that one."""
    places = torch.full((len(found),), -1)
    if len(found) == len(wanted):
        here = (found - wanted).square().sum(1)
        stays = here <= _NEAR**2 * torch.minimum(found.square().sum(1), wanted.square().sum(1))
        places[stays] = stays.nonzero()[:, 0]
    open_rows = (places < 0).nonzero()[:, 0]
    places[open_rows] = _exact(found[open_rows], wanted)
    open_rows = (places < 0).nonzero()[:, 0]
    some = open_rows[:: len(open_rows) // _SAMPLE + 1]
    places[some] = _nearest_of_all(found[some], wanted)
    if int((places[some] >= 0).sum()) >= _LEAST_MATCHED * len(some):
        rest = (places < 0).nonzero()[:, 0]
        places[rest] = _nearest_of_all(found[rest], wanted)
    return places


def _exact(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The row of wanted that each row is but for the last bits, -1 for none: one of those whose
    first elements are next to its own."""
    order = wanted[:, 0].argsort()
    at = torch.searchsorted(wanted[order, 0].contiguous(), found[:, 0].contiguous())
    beside = (at[:, None] + torch.arange(-_BESIDE, _BESIDE)).clamp(0, len(wanted) - 1)
    places = order[beside]
    far = (found[:, None] - wanted[places]).square().sum(2)
    best, index = far.min(1)
    chosen = places.gather(1, index[:, None])
    second = far.masked_fill(places == chosen, torch.inf).min(1)[0]
    squares = found.square().sum(1)
    near = (best <= _EXACT * squares) & (second > _EXACT * squares)
    return torch.where(near, chosen[:, 0], -1)


def _nearest_of_all(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The row of wanted that each row is nearest to, -1 where none, or more than one, is near."""
    places = torch.full((len(found),), -1)
    squares = wanted.square().sum(1)
    step = max(1, _DISTANCES // len(wanted))
    for start in range(0, len(found), step):
        rows = found[start : start + step]
        own = rows.square().sum(1)
        far = (squares + own[:, None] - 2 * rows @ wanted.t()).clamp_min_(0)
        best, index = far.topk(min(2, len(wanted)), largest=False)
        near = best[:, 0] <= _NEAR * own
        if len(wanted) > 1:
            near &= best[:, 0] <= _NEAR * best[:, 1]
        places[start : start + step] = torch.where(near, index[:, 0], -1)
    return places


def divisors(count: int) -> list[int]:
    """Return the divisors of a number but for 1 and itself, ascending."""
    return [size for size in range(2, count // 2 + 1) if count % size == 0]


# --- Words ----------------------------------------------------------------------------------------


def clause(places: torch.Tensor, subject: Subject) -> str:
    """Return the clause that names an order."""
    count = len(places)
    every = torch.arange(count)
    moved = (places != every).nonzero()[:, 0]
    first, last = int(moved[0]), int(moved[-1])
    if len(moved) == 2:
        return causes.two_exchanged(f"its {subject.noun}s", first, last)
    if words := _whole(places, subject) or _blocks_exchanged(places, subject):
        return words
    if last - first + 1 < count:
        inner = places[first : last + 1] - first
        of = causes.from_to(subject.of, subject.noun, first, last)
        if words := _whole(inner, Subject(subject.noun, of, subject.head)):
            return words
    for size in divisors(count):
        if words := _within_each(places, size, subject):
            return words
    for size in reversed(divisors(count)):
        if words := _in_blocks(places, size, subject):
            return words
    return causes.reordered(subject.of, len(moved), count)


def _whole(places: torch.Tensor, subject: Subject) -> str:
    """The clause of an order of one rule, "" if there is none."""
    count = len(places)
    every = torch.arange(count)
    if torch.equal(places, every.flip(0)):
        return causes.reverse_order(subject.of)
    by = int(-places[0]) % count
    if torch.equal(places, every.roll(by)):
        if 2 * by == count:
            return causes.halves_swapped(subject.of)
        return causes.rolled(subject.of, by if 2 * by < count else by - count, subject.head)
    for parts in divisors(count):
        if torch.equal(places, every.view(parts, -1).t().reshape(-1)):
            if 2 * parts <= count and parts * parts <= count:
                return causes.alternating(subject.of, parts)
            return causes.taken_apart(subject.of, count // parts)
    return ""


def _within_each(places: torch.Tensor, size: int, subject: Subject) -> str:
    """The clause of an order that is the same in every group of this size, "" if there is none."""
    groups = places.view(-1, size) - torch.arange(0, len(places), size)[:, None]
    if int(groups.min()) < 0 or int(groups.max()) >= size or not bool((groups == groups[0]).all()):
        return ""
    where = causes.within_each(subject.noun, size, subject.head)
    return clause(groups[0], Subject(subject.noun, where))


def _block_order(places: torch.Tensor, size: int) -> torch.Tensor | None:
    """The order of blocks of this size, None where one is not whole."""
    starts = places[::size]
    whole = (starts[:, None] + torch.arange(size)).reshape(-1)
    if bool((starts % size).any()) or not torch.equal(places, whole):
        return None
    return starts // size


def _blocks_exchanged(places: torch.Tensor, subject: Subject) -> str:
    """The clause of two blocks' exchange, "" for any other order."""
    for size in reversed(divisors(len(places))):
        order = _block_order(places, size)
        if order is None:
            continue
        moved = (order != torch.arange(len(order))).nonzero()[:, 0].tolist()
        if len(moved) == 2:
            one = causes.block(subject.noun, size, subject.head)
            return causes.two_exchanged(one, *moved)
    return ""


def _in_blocks(places: torch.Tensor, size: int, subject: Subject) -> str:
    """The clause of an order of whole blocks of this size, "" if there is none."""
    order = _block_order(places, size)
    if order is None:
        return ""
    of = causes.blocks(subject.noun, size, subject.head)
    moved = int((order != torch.arange(len(order))).sum())
    return _whole(order, Subject(subject.noun, of)) or causes.reordered(of, moved, len(order))
