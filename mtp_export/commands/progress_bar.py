"""Progress shown by tqdm: a bar in a terminal or notebook, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm.asyncio import tqdm as terminal_tqdm
from tqdm.auto import tqdm

from mtp_checkpoints.errors import Interrupted
from mtp_export.progress import CountCallback, ProgressCallback, silent

SECONDS_BETWEEN_LINES = 5.0
_FORMAT = "{l_bar}{bar}| {n_fmt} of {total_fmt}{unit}, {rate}{remaining} left{postfix}"
_NARROW_COLUMNS, _NARROW_FORMAT = 64, "{percentage:3.0f}%, {remaining} left: {desc}"
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
    terminal keeps nothing of it, and a log gets no line of what is done at once. Shows nothing when
    quiet."""
    if quiet or not total:
        yield int
        return
    with _passing_bar(desc=title, total=total, unit=f" {unit}") as bar:
        yield bar.update


@contextmanager
def loading_bars(*, quiet: bool = False) -> Iterator[None]:
    """Show the bytes of every model that is loaded while the block runs, as count_bar shows a
    count."""
    from mtp_runtime.loading.progress import loading_shown

    @contextmanager
    def show(folder: Path, total_bytes: int) -> Iterator[CountCallback]:
        if quiet or not total_bytes:
            yield int
            return
        title, lock = f"Loading {folder.absolute().name}", threading.Lock()
        with _passing_bar(desc=title, total=total_bytes, unit="B", unit_scale=True) as bar:

            def advance(read_bytes: int) -> None:
                with lock:  # scales are read again with every part of a matrix
                    bar.update(min(read_bytes, total_bytes - bar.n))

            yield advance
            advance(total_bytes)  # copies of tensors are compared, and not loaded

    with loading_shown(show):
        yield


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


def _passing_bar(**options: Any) -> Any:
    """Return a bar of which a terminal keeps nothing, and a log where it took a while."""
    bar = _bar(**options)
    bar.leave = False
    if isinstance(bar, _Lines):
        bar.tells_end = False
    return bar


def _bar(**options: Any) -> Any:
    """Return a bar where one can be drawn, lines elsewhere."""
    if tqdm is not terminal_tqdm:  # inside a notebook, which is no terminal
        return tqdm(**options)
    if not sys.stderr.isatty():
        return _Lines(**options)
    is_narrow = os.get_terminal_size(sys.stderr.fileno()).columns < _NARROW_COLUMNS
    rate = "{rate_fmt}, " if "unit_scale" in options else ""  # of bytes alone
    shown = _NARROW_FORMAT if is_narrow else _FORMAT.replace("{rate}", rate)
    return tqdm(**options, bar_format=shown, dynamic_ncols=True)


class _Lines(terminal_tqdm):  # type: ignore[misc]
    """Progress as a line every few seconds and one at the end: a log shows no carriage returns."""

    monitor_interval = 0  # no thread that redraws: a line says something new or is not written
    tells_end = True  # where no line was due before
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
        if not self.disable and (self.tells_end or self._written is not None):
            self.display()
        super().close()
