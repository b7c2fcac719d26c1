"""Progress shown by tqdm: a bar in a terminal or notebook, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, ParamSpec, Self, TypeVar

from tqdm.asyncio import tqdm as terminal_tqdm
from tqdm.auto import tqdm

from mtp_checkpoints.errors import Interrupted
from mtp_export.progress import CountCallback, ProgressCallback, silent

_P = ParamSpec("_P")
_T = TypeVar("_T")
SECONDS_BETWEEN_LINES = 5.0
_FORMAT = "{l_bar}{bar}| {n_fmt} of {total_fmt}{unit}, {rate}{remaining} left{postfix}"
_NARROW_COLUMNS, _NARROW_FORMAT = 64, "{percentage:3.0f}%, {remaining} left: {desc}"
_USUAL_COLUMNS, _USUAL_ROWS = 80, 24
_LINE_FORMAT = (
    "{desc}: {percentage:.0f}%, {n_fmt}{unit} of {total_fmt}{unit}, {rate_fmt}, {remaining} left"
    "{postfix}"
)


@contextmanager
def progress_bar(
    title: str, total_bytes: int, *, quiet: bool = False, waits: bool = False
) -> Iterator[ProgressCallback]:
    """Show progress on stderr while the block runs, by the bytes that the callback is given.

    Shows nothing when quiet, or when there is nothing to do; waits: nor before the callback is
    called, as of a run that is refused. Ctrl-C becomes Interrupted, with the share that is done.
    """
    if quiet or not total_bytes:
        yield silent
        return
    lock, done = threading.Lock(), 0
    with ExitStack() as shown:

        @cache
        def bar() -> Any:
            drawn = _bar(desc=title, total=total_bytes, unit="B", unit_scale=True)
            return shown.enter_context(drawn)

        def advance(done_bytes: int) -> None:
            nonlocal done
            with lock:  # update() reads and writes the count in two steps
                bar().update(done_bytes)
                done += done_bytes

        if not waits:
            bar()
        try:
            yield advance
        except KeyboardInterrupt:
            raise Interrupted(min(1.0, done / total_bytes)) from None


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


class Standby:
    """Line that a terminal shows of a long command while it has no bar.

    Its bars are those that between() returned; without a title there is no line.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet, self._title, self._bars = quiet, "", 0
        self._shown = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.tell("")

    def tell(self, title: str) -> None:
        """Say what is being done from now on."""
        self._title = title
        self._show()

    def between(
        self, bar: Callable[_P, AbstractContextManager[_T]]
    ) -> Callable[_P, AbstractContextManager[_T]]:
        """Return what opens bars in the line's place."""

        @contextmanager
        def shown(*words: _P.args, **more: _P.kwargs) -> Iterator[_T]:
            self._bars += 1
            self._show()
            try:
                with bar(*words, **more) as advance:
                    yield advance
            finally:
                self._bars -= 1
            self._show()  # and not behind an error, which ends what the line tells of

        return shown

    def _show(self) -> None:
        self._shown.close()
        if not self._title or self._bars or self._quiet or not sys.stderr.isatty():
            return
        columns = os.get_terminal_size(sys.stderr.fileno()).columns or _USUAL_COLUMNS
        title = f"{self._title} ..."[: columns - 1]
        line = terminal_tqdm(
            desc=title, bar_format="{desc}", leave=False, ncols=columns, nrows=_USUAL_ROWS
        )
        self._shown.enter_context(closing(line))


@contextmanager
def loading_bars(*, quiet: bool = False, standby: Standby | None = None) -> Iterator[None]:
    """Show the bytes of every model that is loaded while the block runs, as count_bar shows a
    count; standby: the line in whose place they are."""
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

    with loading_shown(show if standby is None else standby.between(show)):
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
    columns, rows = os.get_terminal_size(sys.stderr.fileno())
    if not (columns and rows):  # of a terminal that nobody told its size tqdm hides the bars
        options |= {"ncols": (columns or _USUAL_COLUMNS) - 1, "nrows": _USUAL_ROWS}
    is_narrow = (columns or _USUAL_COLUMNS) < _NARROW_COLUMNS
    rate = "{rate_fmt}, " if "unit_scale" in options else ""  # of bytes alone
    shown = _NARROW_FORMAT if is_narrow else _FORMAT.replace("{rate}", rate)
    return tqdm(**options, bar_format=shown, dynamic_ncols="nrows" not in options)


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
