"""Changes of tensors that the slope of plain text's loss points to, in a model of few layers.

A tensor that was changed is no longer where training left it: the loss falls from it towards what
it was. The slope, one pass back through the model, is multiplied with each way from a tensor to
what it would be with a change undone: orders of rows and columns, parts of another size, the
directions that an adapter added, two tensors in each other's place. Of all those the best are tried
on text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, combinations

import torch
from torch import Tensor

from mtp_export.verify.diagnosis.causes import decoding as causes
from mtp_export.verify.diagnosis.causes import pointed as words_of
from mtp_export.verify.diagnosis.layer_variants import LayerVariant
from mtp_export.verify.diagnosis.orders import Subject, clause
from mtp_export.verify.diagnosis.tensor_variants import OF_MATRICES, OF_VECTORS
from mtp_export.verify.diagnosis.trainable import Spot
from mtp_export.verify.diagnosis.trained import Trials, Tried

MOST_POINTED, MOST_TRIED = 32, 6  # changes that are tried on some texts, and on all
_MOST_RANK = 8  # of an adapter
# Elements of a vector, of fewer than which two in a layer are tried in each other's place whatever
# the slope says: it falls by chance as far.
_FEW = 64
_LEAST_RANKED = 16  # rows and columns, of which it is a part
_MOST_DECOMPOSED = 1 << 18  # elements
_MOST_ORDERED = 4096  # rows or columns
_MOST_EXCHANGED = 1 << 26  # elements of all tensors of one shape
_BLOCKS = (2, 4, 8)
_TURNS = (2, 4)
_LEAST_PART, _LENGTHS = 8, 64  # of the rows, an eighth, in so many lengths
_FACTORS = (0.5, 2.0)
_OF_PARTS = (0.25, 0.5, 2.0, 4.0)
_OFFSETS = (1.0, -1.0)
_DIGITS = 3  # of how surely a slope falls, by which ways of one direction are told


@dataclass(frozen=True)
class Undone:
    """A change of a tensor undone: in words that follow "when", {} being its name; what is wrong,
    behind its name; the values then."""

    done: str
    wrong: str
    values: Tensor
    is_size: bool = False


@dataclass(frozen=True)
class _Way:
    """A change that the slope points to: a variant, its tensors, and how surely, in standard errors
    of what it points to by chance."""

    variant: LayerVariant
    values: tuple[tuple[Spot, Tensor], ...]
    sure: float

    @property
    def is_of_few(self) -> bool:
        """True for two vectors of few elements, of one layer."""
        is_short = all(values.numel() < _FEW for _, values in self.values)
        return is_short and len({spot.layer for spot, _ in self.values}) < len(self.values)

    def length(self) -> float:
        """The squared distance of its tensors from those values."""
        return sum(float((other - spot.values()).square().sum()) for spot, other in self.values)


def pointed(trials: Trials) -> Iterator[Tried]:
    """Yield the changes that slopes point to most surely and that some texts are likelier under,
    with the judging texts under them."""
    slopes = trials.slopes()
    found = [way for spot, slope in slopes.items() for way in _of_one(trials, spot, slope)]
    found += _of_two(trials, slopes)
    spot = next(iter(slopes))
    own = trials.loss_under([(spot, spot.values())])
    screened = []
    directions = _by_direction(found)
    few = (ways for ways in directions[MOST_POINTED:] if ways[0].is_of_few)
    for ways in chain(directions[:MOST_POINTED], few):
        ways.sort(key=_Way.length)
        if (loss := trials.loss_under(ways[0].values)) < own:
            screened.append((loss, ways))
    for _, ways in sorted(screened, key=lambda pair: pair[0])[:MOST_TRIED]:
        best = min(ways, key=lambda way: trials.loss_under(way.values))
        yield best.variant, trials.under(best.values)


def _by_direction(found: Iterable[_Way]) -> list[list[_Way]]:
    """Ways by their direction, in which the slope falls as surely, surest first."""
    alike: dict[tuple[object, ...], list[_Way]] = {}
    for way in found:
        spots = (spot for spot, _ in way.values)
        alike.setdefault((*spots, round(way.sure, _DIGITS)), []).append(way)
    return sorted(alike.values(), key=lambda ways: -ways[0].sure)


def _of_one(trials: Trials, spot: Spot, slope: Tensor) -> Iterator[_Way]:
    """Yield the way to each undone change of a tensor."""
    values, name, where = spot.values(), spot.place.name, trials.model.where(spot.layer)
    changes = of_vector if values.ndim == 1 else of_matrix
    for one in changes(values, slope):
        sure = sureness(slope, one.values - values)
        variant = LayerVariant(
            spot.layer,
            one.done.format(f"{name} of {where}"),
            causes.of_tensor(name, where, one.wrong),
            half=spot.half,
            is_of_tensor=True,
            is_size=one.is_size,
        )
        yield _Way(variant, ((spot, one.values),), sure)


def sureness(slope: Tensor, way: Tensor) -> float:
    """Return how far a slope falls along a way, in standard errors of what its elements add up to
    by chance."""
    falls = -slope * way
    return float(falls.sum()) / max(float(falls.norm()), 1e-30)


def _in_errors(fall: float, norms: Tensor, count: int) -> float:
    return fall / max(float(norms), 1e-30) * math.sqrt(count)


def _of_any(values: Tensor, slope: Tensor) -> Iterator[Undone]:
    yield Undone("{} is negated", causes.WRONG_SIGN, -values)
    for factor in _FACTORS:
        words = f"{{}} is multiplied by {factor:g}"
        yield Undone(words, causes.times(1 / factor), values * factor, is_size=True)


def of_vector(values: Tensor, slope: Tensor) -> Iterator[Undone]:
    """Yield a vector with each change undone, the likeliest of those that have numbers."""
    yield from _of_any(values, slope)
    for by, wrong in zip(_OFFSETS, (causes.LACKS_ONE, causes.ONE_TOO_MUCH), strict=True):
        done = "added to" if by > 0 else "taken from"
        yield Undone(f"1 is {done} the weights of {{}}", wrong, values + by)
    if len(values) > 1:
        yield from _in_order(values, slope, "element")
        yield from _in_part(values, slope, "element")


def of_matrix(values: Tensor, slope: Tensor) -> Iterator[Undone]:
    """Yield a matrix with each change undone, the likeliest of those that have numbers."""
    yield from _of_any(values, slope)
    for noun in ("row", "column"):
        is_row = noun == "row"
        turned = (values, slope) if is_row else (values.t(), slope.t())
        for one in (*_in_order(*turned, noun), *_in_part(*turned, noun)):
            yield one if is_row else replace(one, values=one.values.t())
    rows, columns = values.shape
    if min(rows, columns) > 1:
        yield Undone(
            "{} is transposed", words_of.TRANSPOSED, values.reshape(columns, rows).t().clone()
        )
    if min(rows, columns) > _LEAST_RANKED and values.numel() <= _MOST_DECOMPOSED:
        yield _without_adapter(values, slope)


def _in_order(values: Tensor, slope: Tensor, noun: str) -> Iterator[Undone]:
    """Yield the rows in each other order, and in the likeliest of those that have a number."""
    count = len(values)
    if not 1 < count <= _MOST_ORDERED:
        return
    cross = slope.reshape(count, -1) @ values.reshape(count, -1).t()
    for order in _orders(cross):
        done, wrong = _words(order, noun)
        yield Undone(done, wrong, values[order])


def _words(order: Tensor, noun: str) -> tuple[str, str]:
    """Return an order as a change, and what is wrong with a tensor that is better in it: in the
    words of one that is tried without a slope too, so that it is named once."""
    for change in OF_VECTORS if noun == "element" else OF_MATRICES:
        way = change.columns if noun == "column" else change.rows
        if way is not None and torch.equal(way(len(order)), order.cpu()):
            return change.done, change.wrong
    words = clause(order.argsort(), Subject.all_of(noun, None))
    return f"the {noun}s of {{}} are put in order", words_of.ordered(words)


def _orders(cross: Tensor) -> Iterator[Tensor]:
    """Yield orders of rows. cross [n, n]: of the slope of each with the values of each."""
    count = len(cross)
    every = torch.arange(count, device=cross.device)
    yield every.flip(0)
    rolled = cross.gather(1, (every[:, None] + every) % count).sum(0)
    yield every.roll(-int(rolled[1:].argmin()) - 1)
    for parts in (parts for parts in _TURNS if count % parts == 0 and count > parts):
        turns = every.view(parts, -1).t().flatten()
        yield turns
        yield turns.argsort()
    falls = dict[float, Tensor]()
    for parts in (parts for parts in _BLOCKS if count % parts == 0):
        blocks = cross.view(parts, count // parts, parts, -1).diagonal(dim1=1, dim2=3).sum(-1)
        for one, other in combinations(range(parts), 2):
            order = every.view(parts, -1).clone()
            order[[one, other]] = order[[other, one]]
            both = [one, other]
            fall = blocks[both, both].sum() - blocks[both, both[::-1]].sum()
            falls[float(fall)] = order.flatten()
    if falls:
        yield falls[max(falls)]


def _in_part(values: Tensor, slope: Tensor, noun: str) -> Iterator[Undone]:
    """Yield the rows with the run of them multiplied that the slope points to."""
    count = len(values)
    by_row = (slope * values).reshape(count, -1).sum(1).double()
    before = torch.cat([by_row.new_zeros(1), by_row.cumsum(0)])
    most, best = -1.0, (0, count)
    least = max(1, count // _LEAST_PART)
    for length in range(least, count // 2 + 1, max(1, count // _LENGTHS)):
        sums = (before[length:] - before[:-length]).abs() / math.sqrt(length)
        if float(sums.max()) > most:
            first = int(sums.argmax())
            most, best = float(sums.max()), (first, first + length)
    first, last = best
    falls = float(by_row[first:last].sum()) < 0  # as it becomes larger
    for factor in (one for one in _OF_PARTS if (one > 1) is falls):
        other = values.clone()
        other[first:last] *= factor
        where = f"{noun}s {first} to {last - 1} of {{}}"
        wrong = words_of.part_times(noun, first, last - 1, 1 / factor)
        yield Undone(f"{where} are multiplied by {factor:g}", wrong, other, is_size=True)


def _without_adapter(values: Tensor, slope: Tensor) -> Undone:
    """The matrix without its largest directions, as many as the slope points away from."""
    left, sizes, right = torch.linalg.svd(values, full_matrices=False)
    parts = left[:, :_MOST_RANK] * sizes[:_MOST_RANK]
    falls = ((slope @ right[:_MOST_RANK].t()) * parts).sum(0).cumsum(0)
    rank = int((falls / sizes[:_MOST_RANK].square().cumsum(0).sqrt()).argmax()) + 1
    other = values - parts[:, :rank] @ right[:rank]
    several = f"the largest {rank} directions of {{}} are left out"
    done = several if rank > 1 else "the largest direction of {} is left out"
    return Undone(done, words_of.adapted(rank), other)


def _of_two(trials: Trials, slopes: dict[Spot, Tensor]) -> Iterator[_Way]:
    """Yield the way to tensors of one shape in each other's place, of one layer or of one name."""
    alike: dict[tuple[int, ...], list[Spot]] = {}
    for spot, slope in slopes.items():
        alike.setdefault(tuple(slope.shape), []).append(spot)
    for shape, spots in alike.items():
        if len(spots) < 2 or len(spots) * math.prod(shape) > _MOST_EXCHANGED:
            continue
        values = torch.stack([spot.values().flatten() for spot in spots])
        falls = torch.stack([slopes[spot].flatten() for spot in spots])
        cross, gram, squares = falls @ values.t(), values @ values.t(), falls.square().sum(1)
        for a, b in combinations(range(len(spots)), 2):
            one, other = spots[a], spots[b]
            if one.layer != other.layer and one.place.name != other.place.name:
                continue
            fall = float(cross[a, a] + cross[b, b] - cross[a, b] - cross[b, a])
            apart = (gram[a, a] + gram[b, b] - 2 * gram[a, b]).clamp_min(0)
            norms = ((squares[a] + squares[b]) * apart).sqrt()
            pair = (one, other.values()), (other, one.values())
            yield _Way(
                _exchanged(trials, one, other), pair, _in_errors(fall, norms, math.prod(shape))
            )


def _exchanged(trials: Trials, one: Spot, other: Spot) -> LayerVariant:
    first, second = (f"{s.place.name} of {trials.model.where(s.layer)}" for s in (one, other))
    words = f"{first} and {second}"
    return LayerVariant(
        one.layer,
        f"{words} are exchanged",
        causes.exchanged(words),
        half=one.half,
        is_of_tensor=True,
    )
