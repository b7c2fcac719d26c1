"""Factors and offsets by which a weight differs from its source's: of the whole, of ranges of rows
or columns, and of each of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from mtp_export.verify.diagnosis.causes import relations as causes
from mtp_export.verify.diagnosis.causes import weights as weight_causes
from mtp_export.verify.diagnosis.compared import LEAST_NOISE
from mtp_export.verify.diagnosis.sketches import Axis, Sketches, Sums

_NEAR_SCALES = 1.5  # ratio of the scales of like tensors, at most
_LEAST_RUN = 4  # elements of a vector, or rows of few elements, with a factor of their own
_MOST_FACTORS = 3
_DRIFT = 0.02  # of a retrained norm's mean, and of the factor that it would be
_UNLIKE_ONE = 0.1  # of the factor beside an offset
_LEAST_OF_BOTH = 16  # elements, of which a factor and an offset leave next to no noise by chance
_OFFSET_NOISE = 2.5e-3  # of the mean of few elements that were rounded
_PLAIN = 0.01  # a factor nearer to one is none
# Squared, of a weight with the source's that it is plus an offset. Norms of any layers are alike in
# part; in a matrix, rounding around an offset leaves little of what is unlike by chance.
_LEAST_CORRELATION, _OF_MATRICES = 0.9, 0.3


class Relation(NamedTuple):
    """A relation of a weight to its source's in words, and its noise as a share of the source's
    squares: the smaller, the more it explains."""

    words: str
    noise: float


def of_the_whole(sketches: Sketches, most_noise: float) -> Iterator[Relation]:
    """Yield the factor, or the offset, that explains the weight within a noise."""
    t = _Total.of(sketches)
    factor = t.wf / t.ww if t.ww else 0.0
    if factor and abs(factor - 1) > _DRIFT:
        noise = (t.ff / factor**2 - 2 * t.wf / factor + t.ww) / t.ww
        if noise <= most_noise:
            yield Relation(_multiple(shown(factor, most_noise)), max(noise, 0.0))
    offset = (t.f - t.w) / t.elements
    noise = t.noise - t.elements * offset**2
    is_far = t.elements * offset**2 > _DRIFT**2 * t.ww
    if t.varies and is_far and noise <= min(most_noise * max(t.ww, t.ff), t.unlike * t.spread):
        share = max(noise, 0.0) / max(t.ww, t.ff)
        yield Relation(causes.plus(signed(offset, most_noise)), share)


def of_both(sketches: Sketches, most_noise: float) -> Iterator[Relation]:
    """Yield the factor and the offset that explain the weight within a noise together."""
    t = _Total.of(sketches)
    if not t.varies or t.elements < _LEAST_OF_BOTH:
        return
    shared = t.wf - t.w * t.f / t.elements
    factor = shared / t.spread
    offset = (t.f - factor * t.w) / t.elements
    noise = t.ff - t.f**2 / t.elements - factor * shared
    most = min(most_noise * max(t.ww, t.ff), t.unlike * factor**2 * t.spread)
    if abs(factor - 1) > _UNLIKE_ONE and noise <= most:
        words = causes.multiple_plus(shown(factor, most_noise), signed(offset, most_noise))
        yield Relation(words, max(noise, 0.0) / max(factor**2 * t.ww, t.ff))


@dataclass(frozen=True)
class _Total:
    """Sums over all elements, as in Sums. spread: Σ(w - mean)². unlike: the share of it that a
    weight which is the source's plus an offset may leave."""

    elements: int
    w: float
    f: float
    ww: float
    ff: float
    wf: float
    noise: float
    unlike: float

    @classmethod
    def of(cls, sketches: Sketches) -> _Total:
        sums = {name: float(value) for name, value in vars(sketches.total).items()}
        least = _LEAST_CORRELATION if sketches.columns is None else _OF_MATRICES
        return cls(elements=sketches.elements, unlike=1 - least, **sums)

    @property
    def spread(self) -> float:
        return self.ww - self.w**2 / self.elements

    @property
    def varies(self) -> bool:
        return self.spread > 1e-9 * self.ww


def _multiple(factor: str) -> str:
    return weight_causes.SIGN_FLIPPED if factor == "-1" else causes.multiple(factor)


def of_parts(sketches: Sketches, most_noise: float, *, other_scales: bool) -> Iterator[Relation]:
    """Yield the factors of ranges of rows or columns that explain the weight within a noise.

    other_scales: its codes are the source's with other scales. Factors as near to each other as
    those of any two tensors are then no sign of a factor.
    """
    for axis in filter(None, (sketches.rows, sketches.columns)):
        found = _of_axis(axis, most_noise, other_scales=other_scales)
        if axis.count > 1 and found is not None:
            yield found


def ratios(axis: Axis, most_noise: float) -> torch.Tensor | None:
    """Return the factor of each row or column [n], NaN where the source's is zero; None where they
    are no multiples of the source's within a noise."""
    sums = axis.sums
    live = sums.ww > 1e-9 * sums.ww.mean()
    if bool((sums.ff[~live] > 0).any()):
        return None
    factors = torch.where(live, sums.wf / sums.ww, torch.nan)
    present = live & (sums.ff > 0)
    if not bool(present.any()):
        return None
    unlike = 1 - sums.wf[present] ** 2 / (sums.ww[present] * sums.ff[present])
    if float(unlike.mean()) > 1.5 * most_noise or float(unlike.max()) > 0.1 + 4 * most_noise:
        return None
    return factors


def _of_axis(axis: Axis, most_noise: float, *, other_scales: bool) -> Relation | None:
    factors = ratios(axis, most_noise)
    if factors is None:
        return None
    fit = math.sqrt(most_noise / axis.elements) * (4 if axis.elements > 1 else 1)
    levels = _levels(factors, max(_PLAIN, min(0.2, fit)))
    if not 2 <= len(levels) <= _MOST_FACTORS:
        return None
    fitted = [_left(axis.sums.select(members), level) for level, members in levels]
    noise = sum(left for _, left in fitted) / float(axis.sums.total.ww)
    changed = {
        shown(factor, most_noise): members
        for (factor, _), (_, members) in zip(fitted, levels, strict=True)
    }
    changed.pop("1", None)
    if not changed or noise > most_noise:
        return None
    if other_scales and all(_is_of_scales(float(factor)) for factor in changed):
        return None
    is_exact = len(changed) < len(levels) == 2 and noise <= LEAST_NOISE
    is_exact = is_exact and all(len(members) >= _LEAST_RUN for members in changed.values())
    is_believed = is_exact or all(_is_believed(*one) for one in changed.items())
    if axis.elements == 1 and not is_believed:
        return None
    words = (_part_words(axis, members, factor) for factor, members in changed.items())
    return Relation(" and ".join(words), noise)


def _is_of_scales(factor: float) -> bool:
    """True for a factor as near to one as the scales of two tensors are to each other."""
    return 1 / _NEAR_SCALES < factor < _NEAR_SCALES


def _is_believed(factor: str, members: torch.Tensor) -> bool:
    """True for a factor of some elements of a vector that a few unlike ones do not give."""
    return factor == "-1" or (_range(members) != "" and len(members) >= _LEAST_RUN)


def _left(sums: Sums, level: float) -> tuple[float, float]:
    """The factor of some rows, and the noise that it leaves."""
    total = sums.total
    ww, wf, ff = (float(one) for one in (total.ww, total.wf, total.ff))
    if level == 0:
        return 0.0, 0.0
    factor = wf / ww
    return factor, max(0.0, ff / factor**2 - 2 * wf / factor + ww)


def _levels(factors: torch.Tensor, tolerance: float) -> list[tuple[float, torch.Tensor]]:
    """Factors that differ, each with the indices that have it; NaN fits any, and counts as one."""
    order = factors.nan_to_num(1.0).argsort()
    levels: list[tuple[float, list[int]]] = []
    values = factors.nan_to_num(1.0).tolist()
    last = math.nan
    for index in order.tolist():
        value = values[index]
        if levels and abs(value - last) <= tolerance * max(abs(value), abs(last)):
            levels[-1][1].append(index)
        else:
            levels.append((value, [index]))
            if len(levels) > _MOST_FACTORS:
                return []
        last = value
    return [(level, torch.tensor(members).sort()[0]) for level, members in levels]


def _range(members: torch.Tensor) -> str:
    first, last = int(members[0]), int(members[-1])
    if last - first + 1 != len(members):
        return ""
    return f"{first} to {last}" if last > first else str(first)


def _part_words(axis: Axis, members: torch.Tensor, factor: str) -> str:
    noun, count, total, places = axis.noun, len(members), axis.count, _range(members)
    if factor == "0":
        return causes.some_zero(noun, places, count, total)
    if factor == "-1":
        return causes.signs_flipped(noun, places, count, total)
    return causes.some_multiplied(noun, places, count, total, factor)


def shown(value: float, most_noise: float) -> str:
    """Return a factor with as many digits as the noise leaves."""
    off = max(1e-4, min(0.05, math.sqrt(most_noise) / 4))
    for digits in range(1, 5):
        words = f"{value:.{digits}g}"
        if abs(float(words) - value) <= off * abs(value):
            break
    return f"{float(words):.4g}"


def signed(value: float, most_noise: float) -> str:
    """Return an offset with its sign."""
    words = shown(value, max(most_noise, _OFFSET_NOISE))
    return words if words.startswith("-") else f"+{words}"
