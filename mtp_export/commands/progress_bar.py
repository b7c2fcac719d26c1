"""Progress shown by tqdm: a bar in a terminal or notebook, plain lines elsewhere."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tqdm.asyncio import tqdm as terminal_tqdm
from tqdm.auto import tqdm

from mtp_checkpoints.errors import Interrupted
from mtp_export.progress import CountCallback, ProgressCallback, silent

SECONDS_BETWEEN_LINES = 5.0
_LINE_FORMAT = (
    "{desc}: {percentage:.0f}%, {n_fmt}{unit} of {total_fmt}{unit}, {rate_fmt}, {remaining} left"
    "{postfix}"
)


@contextmanager
def progress_bar(
    title: str, total_bytes: int, *, quiet: bool = False
) -> Iterator[ProgressCallback]:
    """Show progress on stderr while the block runs, by the bytes that the callback is given.

    Shows nothing when quiet, or when there is nothing to do. Ctrl-C becomes Interrupted, with the
    share that is done.
    """
    if quiet or not total_bytes:
        yield silent
        return
    bar = _bar(desc=title, total=total_bytes, unit="B", unit_scale=True)
    lock = threading.Lock()

    def advance(done_bytes: int) -> None:
        with lock:  # update() reads and writes the count in two steps
            bar.update(done_bytes)

    with bar:
        try:
            yield advance
        except KeyboardInterrupt:
            raise Interrupted(min(1.0, bar.n / total_bytes)) from None


@contextmanager
def count_bar(title: str, total: int, unit: str, *, quiet: bool = False) -> Iterator[CountCallback]:
    """Show progress on stderr while the block runs, by the count that the callback is given; a
    terminal keeps nothing of it. Shows nothing when quiet."""
    if quiet or not total:
        yield int
        return
    with _bar(desc=title, total=total, unit=f" {unit}") as bar:
        bar.leave = False
        yield bar.update


@contextmanager
def above_bars() -> Iterator[None]:
    """Erase a terminal's bars while the block writes to stderr; they go on below what it wrote."""
    if not sys.stderr.isatty():
        yield
        return
    with terminal_tqdm.external_write_mode(file=sys.stderr):
        yield


class CountBar:
    """Progress by a count, with a note behind it; it ends when the count is reached."""

    def __init__(self, title: str, total: int, unit: str, *, done: int = 0) -> None:
        self._bar = _bar(desc=title, total=total, unit=f" {unit}", initial=done)

    def advance(self, count: int, note: str = "") -> None:
        """Add to the count."""
        if note:
            self._bar.set_postfix_str(note, refresh=False)
        self._bar.update(count)
        if self._bar.n >= self._bar.total:
            self._bar.close()


def _bar(**options: Any) -> Any:
    """Return a bar where one can be drawn, lines elsewhere."""
    # tqdm.auto is another class than a terminal's only inside a notebook, which is no terminal.
    is_drawn = tqdm is not terminal_tqdm or sys.stderr.isatty()
    return tqdm(**options, dynamic_ncols=True) if is_drawn else _Lines(**options)


class _Lines(terminal_tqdm):  # type: ignore[misc]
    """Progress as a line every few seconds and one at the end: a log shows no carriage returns."""

    monitor_interval = 0  # no thread that redraws: a line says something new or is not written
    _written: float | None = None  # the count that the last line told

    def __init__(self, **options: Any) -> None:
        super().__init__(
            mininterval=SECONDS_BETWEEN_LINES,
            delay=SECONDS_BETWEEN_LINES,
            miniters=1,
            bar_format=_LINE_FORMAT,
            leave=False,
            **options,
        )

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        """Write the state as a line; a message is tqdm's way to erase a bar, and not written."""
        if msg is None and self._written != self.n:
            self._written = self.n
            self.fp.write(f"{self}\n")
        return False

    def close(self) -> None:
        if not self.disable:
            self.display()
        super().close()
