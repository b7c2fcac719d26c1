"""Rules for the number of drafts per step: fixed, by batch size, or by measured gain and cost.

No rule looks at a draft that is not verified yet, so that the output's distribution stays the
target's whichever is used.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log2
from statistics import median_low
from typing import Protocol

import numpy as np

from mtp_runtime.config import SpeculationConfig

_SAMPLES = 5  # of a time: their median shrugs off a step that was interrupted
_AT_FIRST = 2  # samples of a length that is measured before any is chosen
_PROBE_STEPS = 32
_KEPT = 0.99  # of what was counted of acceptance, at each step
_FIRST_ACCEPTANCE, _WEIGHT = 0.8, 2.0  # assumed at first, and how many drafts outweigh it


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
    steps: batch sizes that differ little share them, and numbers of drafts that were not tried lie
    between those that were. Lengths next to the best one are tried every _PROBE_STEPS steps, so
    that a better one is found when text or load change.
    """

    def __init__(self, max_drafts: int) -> None:
        self._max = max_drafts
        self._reached, self._accepted = np.zeros(max_drafts), np.zeros(max_drafts)
        # Seconds per request of recent steps, by class of batch sizes and then by drafts.
        self._seconds: dict[int, dict[int, deque[float]]] = {}
        self._steps = 0

    def choose(self, batch: int) -> int:
        times = self._seconds.get(_class_of(batch), {})
        first = min(self._measured_first(), key=lambda drafts: len(times.get(drafts, ())))
        if len(times.get(first, ())) < _AT_FIRST:
            return first
        best = int(np.argmax(self._tokens() / self._times(times)))
        self._steps += 1
        if self._steps % _PROBE_STEPS:
            return best
        other = best + (1 if self._steps // _PROBE_STEPS % 2 else -1)
        return min(max(other, 0), self._max)

    def observe(self, step: Step) -> None:
        batch = len(step.blocks)
        times = self._seconds.setdefault(_class_of(batch), {})
        times.setdefault(step.asked, deque(maxlen=_SAMPLES)).append(step.seconds / batch)
        self._reached *= _KEPT
        self._accepted *= _KEPT
        for drafts, accepted in step.blocks:
            self._reached[: min(drafts, accepted + 1)] += 1.0
            self._accepted[:accepted] += 1.0

    def _measured_first(self) -> tuple[int, ...]:
        """Return the lengths whose times give those of all others: the ends, and between them."""
        ends = (self._max, 0)
        return (*ends, self._max // 2) if self._max > 2 else ends

    def _times(self, times: Mapping[int, Sequence[float]]) -> np.ndarray:
        """Return seconds per request [max_drafts + 1] of every length."""
        tried = sorted(times)
        return np.interp(
            np.arange(self._max + 1), tried, [median_low(times[drafts]) for drafts in tried]
        )

    def _tokens(self) -> np.ndarray:
        """Return E[L] [max_drafts + 1] of every length. A position that was not reached lately is
        taken to be as the one before."""
        expected, share, acceptance = [1.0], 1.0, _FIRST_ACCEPTANCE
        for reached, accepted in zip(self._reached, self._accepted, strict=True):
            acceptance = (accepted + _WEIGHT * acceptance) / (reached + _WEIGHT)
            share *= acceptance
            expected.append(expected[-1] + share)
        return np.array(expected)


def _class_of(batch: int) -> int:
    """Return the class of batch sizes, in steps of sqrt(2): 1, 2, 3, 4, 5 to 6, 7 to 9, ..."""
    return round(2 * log2(batch))


def draft_length(config: SpeculationConfig) -> DraftLength:
    """Return the rule that a configuration asks for."""
    if config.adaptive:
        return AdaptiveLength(config.draft_tokens)
    return ScheduledLength(config.k_schedule or ((1, config.draft_tokens),))
