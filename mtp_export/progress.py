"""Progress as a callback, and the ways to show it: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

_SECONDS_BETWEEN_LINES = 5.0


class ProgressCallback(Protocol):
    """Called with the bytes just done; from any thread."""

    def __call__(self, done_bytes: int) -> None: ...


def silent(done_bytes: int) -> None:
    """Progress that nobody watches."""


def format_bytes(count: float) -> str:
    """Bytes for people, in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


@contextmanager
def shown(
    console: Console, title: str, total_bytes: int, quiet: bool
) -> Iterator[ProgressCallback]:
    """A callback whose calls are shown on the console while the block runs."""
    if quiet:
        yield silent
    elif console.is_terminal:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console) as bar:
            task = bar.add_task(title, total=total_bytes)
            yield lambda done_bytes: bar.update(task, advance=done_bytes)
    else:
        yield _PlainLines(console, title, total_bytes)


class _PlainLines:
    """A line every few seconds, and one at the end."""

    def __init__(self, console: Console, title: str, total_bytes: int) -> None:
        self._console, self._title, self._total = console, title, total_bytes
        self._done = 0
        self._finished = False
        self._start = self._last = time.monotonic()
        self._lock = threading.Lock()

    def __call__(self, done_bytes: int) -> None:
        with self._lock:
            self._done += done_bytes
            now = time.monotonic()
            ends = self._done >= self._total and not self._finished
            if now - self._last < _SECONDS_BETWEEN_LINES and not ends:
                return
            self._last, self._finished = now, self._finished or ends
            seconds = max(now - self._start, 1e-9)
            rate = self._done / seconds
            left = (self._total - self._done) / rate if rate else 0.0
            self._console.print(
                f"{self._title}: {format_bytes(self._done)} of {format_bytes(self._total)},"
                f" {format_bytes(rate)}/s, {left:.0f} s left",
                highlight=False,
                soft_wrap=True,
            )
