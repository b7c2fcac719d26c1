"""Rules for the number of drafts per step: fixed, by batch size, or by measured gain and cost.

No rule looks at a draft that is not verified yet, so that the output's distribution stays the
target's whichever is used.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

import numpy as np

from mtp_runtime.config import SpeculationConfig

_SAMPLES = 5  # of a cost: their median shrugs off a step that was interrupted
_ALIKE = 0.15  # numbers of rows that differ by this share cost about the same
_PROBE_STEPS = 32
_KEPT = 0.98  # of what was counted of acceptance, at each step
_FIRST_ACCEPTANCE, _WEIGHT = 0.8, 2.0  # assumed at first, and how many drafts outweigh it


@dataclass(frozen=True)
class Step:
    """One step of decoding requests: verified and accepted drafts of each, the drafts that each was
    asked for, seconds of drafting, and seconds of all else.

    A drafter may find fewer drafts than it was asked for, so that asking costs less than rows.
    """

    blocks: Sequence[tuple[int, int]]
    asked: int
    draft_seconds: float
    target_seconds: float

    @property
    def rows(self) -> int:
        """Number of rows that were asked for."""
        return len(self.blocks) * (self.asked + 1)


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
    """Chooses the number of drafts with most tokens per second, E[L] / (V(rows) + c * drafts).

    E[L] follows from the acceptance of each position in recent blocks, V from the times of recent
    steps by their rows, c from the times of drafting. Lengths next to the best one are tried every
    _PROBE_STEPS steps, so that a better one is found when text or load change.
    """

    def __init__(self, max_drafts: int) -> None:
        self._max = max_drafts
        self._reached, self._accepted = np.zeros(max_drafts), np.zeros(max_drafts)
        self._target_seconds: dict[int, deque[float]] = {}  # by rows
        self._draft_seconds: dict[int, deque[float]] = {}  # of one draft each, by batch size
        self._steps = 0

    def choose(self, batch: int) -> int:
        for drafts in self._to_measure():
            if not self._is_measured(batch * (drafts + 1)):
                return drafts
        best = max(range(self._max + 1), key=lambda drafts: self._rate(batch, drafts))
        self._steps += 1
        if self._steps % _PROBE_STEPS:
            return best
        other = best + (1 if self._steps // _PROBE_STEPS % 2 else -1)
        return min(max(other, 0), self._max)

    def observe(self, step: Step) -> None:
        _note(self._target_seconds, step.rows, step.target_seconds)
        if step.asked:
            _note(self._draft_seconds, len(step.blocks), step.draft_seconds / step.asked)
        self._reached *= _KEPT
        self._accepted *= _KEPT
        for drafts, accepted in step.blocks:
            self._reached[: min(drafts, accepted + 1)] += 1.0
            self._accepted[:accepted] += 1.0

    def _to_measure(self) -> Iterator[int]:
        """Yield the lengths whose costs give those of all others: the ends, and between them."""
        yield self._max
        yield 0
        if self._max > 2:
            yield self._max // 2

    def _is_measured(self, rows: int) -> bool:
        return any(abs(known - rows) <= _ALIKE * rows for known in self._target_seconds)

    def _rate(self, batch: int, drafts: int) -> float:
        """Return the expected tokens per second of each request."""
        seconds = _at(self._target_seconds, batch * (drafts + 1))
        return self._tokens(drafts) / (seconds + drafts * _at(self._draft_seconds, batch))

    def _tokens(self, drafts: int) -> float:
        """Return E[L]. A position that was not reached lately is taken to be as the one before."""
        expected, share, acceptance = 1.0, 1.0, _FIRST_ACCEPTANCE
        for reached, accepted in zip(self._reached[:drafts], self._accepted[:drafts], strict=True):
            acceptance = (accepted + _WEIGHT * acceptance) / (reached + _WEIGHT)
            share *= acceptance
            expected += share
        return expected


def _note(costs: dict[int, deque[float]], size: int, seconds: float) -> None:
    costs.setdefault(size, deque(maxlen=_SAMPLES)).append(seconds)


def _at(costs: Mapping[int, deque[float]], size: int) -> float:
    """Return the cost of a size, between those of the sizes next to it that are known."""
    if not costs:
        return 0.0
    sizes = sorted(costs)
    largest = sizes[-1]
    if size > largest:
        return median(costs[largest]) * size / largest
    return float(np.interp(size, sizes, [median(costs[known]) for known in sizes]))


def draft_length(config: SpeculationConfig) -> DraftLength:
    """Return the rule that a configuration asks for."""
    if config.adaptive:
        return AdaptiveLength(config.draft_tokens)
    return ScheduledLength(config.k_schedule or ((1, config.draft_tokens),))
