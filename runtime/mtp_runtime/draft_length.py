"""Rules for the number of drafts per step: fixed, by batch size, or by measured gain and cost.

No rule looks at a draft that is not verified yet, so that the output's distribution stays the
target's whichever is used.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import log2
from statistics import fmean, median, median_low
from typing import Protocol

import numpy as np

from mtp_runtime.config import SpeculationConfig
from mtp_runtime.models.draft_cost import DraftCost

_TIMES_KEPT = 41  # of every length
_FIRST_TRIES = 3  # of every length, before any is chosen
_PACES_KEPT, _LATEST_PACES = 25, 5  # to know how steps scatter, and of them those of the pace
_FIRST_SCATTER = 0.15  # of a step's pace, assumed at first
_MARGIN_ERRORS = 2.5  # standard errors by which a length may be better than it looks
_STEPS_TO_DOUBTFUL_TRY = 3  # between tries of lengths that may be better
_STEPS_TO_NEIGHBOUR_TRY = 40  # between tries of lengths that may become so
_LEAST_RATE_TRIED = 0.8  # of the best length's rate
_DEVIATION_PER_MEDIAN = 1.48  # standard deviation by the median one, of a normal distribution
_COUNTS_KEPT = 0.99  # share of the counts of acceptance that a step leaves
_PRIOR_ACCEPTANCE, _PRIOR_DRAFTS = 0.8, 2.0  # assumed at first, and how many drafts outweigh it


@dataclass(frozen=True)
class Step:
    """One step of decoding requests: verified and accepted drafts of each, the drafts that each was
    asked for, and the seconds of drafting and all else.

    A drafter may find fewer drafts than it was asked for, so that asking costs less than rows.
    """

    blocks: Sequence[tuple[int, int]]
    asked: int
    seconds: float


class DraftLength(Protocol):
    """Chooses how many drafts each decoding request of a step gets."""

    def choose(self, batch: int) -> int:
        """Return the number of drafts for each of `batch` requests; 0 is plain decoding."""

    def observe(self, step: Step) -> None:
        """Take in what a step brought and cost."""


@dataclass(frozen=True)
class ScheduledLength:
    """Numbers of drafts by batch size: each (from, drafts) counts up to the next."""

    schedule: Sequence[tuple[int, int]]

    def choose(self, batch: int) -> int:
        return [drafts for first, drafts in self.schedule if first <= batch][-1]

    def observe(self, step: Step) -> None:
        return


class AdaptiveLength:
    """Chooses the number of drafts with most tokens per second, E[L] / T(batch size, drafts).

    E[L] follows from the acceptance of each position in recent blocks, T from the times of recent
    steps, which batch sizes that differ little share. Lengths that may be better, by how much times
    scatter, are tried every few steps until that is settled; and now and then those that may become
    better when text or load change. cost: of steps by the bytes that they touch, where that is
    known: lengths that do not pay by it are not tried at first, and take that long until they are.
    """

    def __init__(self, max_drafts: int, cost: DraftCost | None = None) -> None:
        self._max, self._cost = max_drafts, cost
        self._reached, self._accepted = np.zeros(max_drafts), np.zeros(max_drafts)
        self._times: dict[int, _Times] = {}  # by class of batch sizes

    def choose(self, batch: int) -> int:
        times, tokens = self._times_of(batch), self._tokens()
        if (untried := times.untried(tokens)) is not None:
            return untried
        rates = tokens / times.expected()
        times.usual = int(np.argmax(rates))
        return times.due(rates)

    def observe(self, step: Step) -> None:
        batch = len(step.blocks)
        self._times_of(batch).add(step.asked, step.seconds / batch)
        self._reached *= _COUNTS_KEPT
        self._accepted *= _COUNTS_KEPT
        for drafts, accepted in step.blocks:
            self._reached[: min(drafts, accepted + 1)] += 1.0
            self._accepted[:accepted] += 1.0

    def _times_of(self, batch: int) -> _Times:
        name = _class_of(batch)
        if name not in self._times:
            lengths, cost = range(self._max + 1), self._cost
            ratios = [0.0 if cost is None else cost.step(drafts, batch) for drafts in lengths]
            self._times[name] = _Times(np.array(ratios))
        return self._times[name]

    def _tokens(self) -> np.ndarray:
        """Return E[L] [max_drafts + 1] of every length. A position that was not reached lately is
        taken to be as the one before."""
        expected, share, acceptance = [1.0], 1.0, _PRIOR_ACCEPTANCE
        for reached, accepted in zip(self._reached, self._accepted, strict=True):
            acceptance = (accepted + _PRIOR_DRAFTS * acceptance) / (reached + _PRIOR_DRAFTS)
            share *= acceptance
            expected.append(expected[-1] + share)
        return np.array(expected)


class _Times:
    """Seconds per request by number of drafts, of a machine as fast as it was at first.

    ratios: of a length's time to that of no drafts, as they are predicted; 0 where none is.

    The usual length's own time is a unit and never changes: what its steps take by it is the
    machine's pace, and lengths that are tried are divided by that. Were it updated from steps
    divided by its own pace, a few slow steps at a time would make it look slower for good.
    """

    def __init__(self, ratios: np.ndarray) -> None:
        self.usual = 0  # the length of steps that try nothing
        self._ratios = ratios
        self._kept = [deque[float](maxlen=_TIMES_KEPT) for _ in ratios]
        self._last = [0] * len(self._kept)  # when each was tried
        self._paces = deque([1.0 - _FIRST_SCATTER, 1.0, 1.0 + _FIRST_SCATTER], maxlen=_PACES_KEPT)
        self._steps = 0  # since another length was tried

    def add(self, drafts: int, seconds: float) -> None:
        if drafts == self.usual and len(self._kept[drafts]) >= _FIRST_TRIES:
            self._paces.append(seconds / _middle(self._kept[drafts]))
        else:
            self._kept[drafts].append(seconds / median_low([*self._paces][-_LATEST_PACES:]))
            self._last[drafts] = max(self._last) + 1

    def due(self, rates: np.ndarray) -> int:
        """Return the usual length, or the one of those to be tried that was not for longest."""
        self._steps += 1
        if self._steps < _STEPS_TO_DOUBTFUL_TRY:
            return self.usual
        others = _others(rates) if self._steps >= _STEPS_TO_NEIGHBOUR_TRY else self._doubtful(rates)
        if not others:
            return self.usual
        self._steps = 0
        return min(others, key=self._last.__getitem__)

    def _doubtful(self, rates: np.ndarray) -> list[int]:
        """Return the lengths whose times are not known well enough to say that they are worse."""
        middle = median(self._paces)
        noise = _DEVIATION_PER_MEDIAN * median(abs(pace / middle - 1.0) for pace in self._paces)
        counts = [max(1, len(times)) for times in self._kept]  # a prediction is as good as a time
        margins = _MARGIN_ERRORS * noise / np.sqrt(counts)
        may_be_better = rates * (1.0 + margins) > rates[self.usual]
        return [int(length) for length in np.flatnonzero(may_be_better) if length != self.usual]

    def untried(self, tokens: np.ndarray) -> int | None:
        """Return a length that is to be tried before any is chosen: of those whose tokens per step
        are predicted to be worth their time."""
        lengths = [int(length) for length in np.flatnonzero(tokens >= self._ratios)]
        least = min(lengths, key=lambda length: len(self._kept[length]))
        return least if len(self._kept[least]) < _FIRST_TRIES else None

    def expected(self) -> np.ndarray:
        """Return seconds per request [max_drafts + 1] of every length."""
        alone = _middle(self._kept[0])
        pairs = zip(self._kept, self._ratios, strict=True)
        return np.array([_middle(times) if times else ratio * alone for times, ratio in pairs])


def _middle(times: Iterable[float]) -> float:
    """Return the mean of the middle half, which no interrupted step is in."""
    ordered = sorted(times)
    quarter = len(ordered) // 4 or (len(ordered) - 1) // 2
    return fmean(ordered[quarter : len(ordered) - quarter])


def _others(rates: np.ndarray) -> list[int]:
    """Return the lengths that may become better than the best: those next to it, and all that are
    nearly as good."""
    best = np.argmax(rates)
    return [
        drafts
        for drafts, rate in enumerate(rates)
        if drafts != best and (abs(drafts - best) == 1 or rate > _LEAST_RATE_TRIED * rates[best])
    ]


def _class_of(batch: int) -> int:
    """Return the class of batch sizes, in steps of sqrt(2): 1, 2, 3, 4, 5 to 6, 7 to 9, ..."""
    return round(2 * log2(batch))


def draft_length(config: SpeculationConfig, cost: DraftCost | None = None) -> DraftLength:
    """Return the rule that a configuration asks for; cost: of its drafts, where that is known."""
    if config.adaptive:
        return AdaptiveLength(config.draft_tokens, cost)
    return ScheduledLength(config.k_schedule or ((1, config.draft_tokens),))
