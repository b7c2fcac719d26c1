"""Clock of a child: its time without what it waited for a processor that others had."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path


class ChildClock:
    """Seconds since a process, which may be waiting or computing, was first asked.

    What its threads waited for a processor does not count, by the kernel's own account of them;
    what they computed does, all together. A kernel that keeps no account gives the time of day.
    """

    def __init__(self, process: int) -> None:
        self._process = Path(f"/proc/{process}/task")
        self._start = time.monotonic()
        self._computed, self._waited = self._account()

    @property
    def seconds(self) -> float:
        """Time by now."""
        passed = time.monotonic() - self._start
        computed, waited = self._account()
        return max(computed - self._computed, passed - max(0.0, waited - self._waited))

    def _account(self) -> tuple[float, float]:
        """Return the seconds that all threads computed, and that they waited to compute."""
        computed = waited = 0
        with suppress(OSError):  # it has ended
            for thread in self._process.iterdir():
                with suppress(OSError):  # it alone has
                    words = (thread / "schedstat").read_text().split()
                    computed, waited = computed + int(words[0]), waited + int(words[1])
        return computed / 1e9, waited / 1e9
