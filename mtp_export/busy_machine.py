"""Rule of when a machine is too busy for rates and gains to be told, and its words: one for
`generate`, `verify` and the server's page."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

TOO_BUSY = "this machine is too busy to tell"
# A share of the time that threads waited for a processor from which rates are those of other load.
MOST_WAITING = 0.1
# The least cost of a step with drafts over one without that is no contradiction, but for noise.
LEAST_COST = 0.95


@dataclass(frozen=True)
class Elapsed:
    """Seconds that decoding took, and the share of its threads' time in which they waited for a
    processor that others had."""

    seconds: float
    waiting: float

    @property
    def is_busy(self) -> bool:
        """True where rates are those of other load."""
        return self.waiting > MOST_WAITING


class Stopwatch:
    """Measures what decoding takes from here on."""

    def __init__(self) -> None:
        self._start, self._before = time.monotonic(), processor_seconds()

    def elapsed(self) -> Elapsed:
        """Return what it took so far."""
        seconds = time.monotonic() - self._start
        computed, waited = map(float.__sub__, processor_seconds(), self._before)
        return Elapsed(seconds, waited / (computed + waited) if computed > 0 else 0.0)


def processor_seconds() -> tuple[float, float]:
    """Return the seconds that the threads of this process have computed, and have waited for a
    processor that others had, by the kernel's account; zeros where it keeps none."""
    computed = waited = 0.0
    with suppress(OSError, ValueError):
        for thread in Path("/proc/self/task").iterdir():
            with suppress(OSError):  # it has ended
                words = (thread / "schedstat").read_text().split()
                computed, waited = computed + int(words[0]) / 1e9, waited + int(words[1]) / 1e9
    return computed, waited


def busy_line(elapsed: Elapsed, untold: str = "rates") -> str:
    """Return what is to be said on a machine with other load. untold: what it cannot tell."""
    waiting = f"waiting for processors {100 * elapsed.waiting:.0f} % of the time"
    return f"{TOO_BUSY} {untold}: {waiting}"


def is_beyond(gain: float, tokens_per_step: float) -> bool:
    """Return True for a speedup above the tokens per step, which other load alone explains."""
    return gain * LEAST_COST > tokens_per_step


def beyond_line(gain: float) -> str:
    """Return what is to be said of such a speedup."""
    return f"{TOO_BUSY} the gain: drafts cannot bring {gain:.1f}x"
