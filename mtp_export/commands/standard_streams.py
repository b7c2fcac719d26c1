"""Standard output and standard error, either of which may go away while the program runs.

Without a reader of its output the program ends quietly, as one that SIGPIPE ends; output that
cannot be written for another reason is a failure. Losing standard error never ends a run.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from io import TextIOWrapper
from typing import Any, TextIO, cast

from mtp_checkpoints.errors import IoError
from mtp_export.progress import counted

_MOST_WAITING = 1 << 18  # characters
_END_SECONDS = 1.0
ENDED_BY_SIGPIPE = 128 + signal.SIGPIPE


class GuardedStream:
    """A stream that tells of its first failed write, and leads nowhere from then on.

    on_loss is called with the error, and may raise another one in its place.
    """

    def __init__(self, stream: TextIO, on_loss: Callable[[OSError], object]) -> None:
        self._stream = stream
        self._on_loss = on_loss
        self.was_written = False

    def write(self, text: str) -> int:
        """Write text, or lose it."""
        self.was_written = True
        try:
            return self._stream.write(text)
        except OSError as error:
            self._lose(error)
        return len(text)

    def flush(self) -> None:
        """Write what is buffered, or lose it."""
        try:
            self._stream.flush()
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        with suppress(OSError):  # a stream without a descriptor
            # What the stream still buffers would fail again when the interpreter ends.
            _lead_nowhere(self._stream.fileno(), os.O_WRONLY)
        self._on_loss(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class UnblockedStream:
    """A stream whose writes never wait for a reader: a thread passes them on, and what comes while
    too much waits is lost, and counted in a line behind what waits then."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._changed = threading.Condition()
        self._texts: list[str] = []
        self._waiting = 0  # characters, of a write under way too
        self._lost = 0  # lines
        self._ended = False
        threading.Thread(target=self._pass_on, name="unblocked stream", daemon=True).start()

    def write(self, text: str) -> int:
        """Take text, or lose it."""
        with self._changed:
            if self._waiting + len(text) > _MOST_WAITING:
                self._lost += text.count("\n")
            else:
                self._texts.append(text)
                self._waiting += len(text)
                self._changed.notify_all()
        return len(text)

    def flush(self) -> None:
        """Wait for nobody."""

    def end(self, seconds: float) -> None:
        """Give the reader so many seconds to take what waits, and lose the rest."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting, seconds)
            self._ended = True
            self._changed.notify_all()

    def _pass_on(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._texts or self._ended)
                if not self._texts:
                    return
                text, lost = "".join(self._texts), self._lost
                self._texts, self._lost = [], 0
            self._write(text)
            with self._changed:
                self._waiting -= len(text)
                if self._lost or lost:
                    words = f"{counted(self._lost + lost, 'line')} were lost: nobody read them\n"
                    self._texts.append(words)
                    self._waiting += len(words)
                    self._lost = 0
                self._changed.notify_all()

    def _write(self, text: str) -> None:
        """Write past the stream's buffer, whose lock the end of the process would wait for."""
        with suppress(OSError, ValueError):  # losing standard error never ends a run
            try:
                descriptor = self._stream.fileno()
            except OSError:  # a stream in memory
                self._stream.write(text)
                return
            data = text.encode(self._stream.encoding or "utf-8", "backslashreplace")
            while data:
                data = data[os.write(descriptor, data) :]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def unblocked_stderr() -> Iterator[None]:
    """Have nothing wait for who reads standard error while the block runs."""
    sys.stderr.flush()
    stream = UnblockedStream(sys.stderr)
    with redirect_stderr(cast(TextIO, stream)):
        try:
            yield
        finally:
            stream.end(_END_SECONDS)


@contextmanager
def guarded_streams() -> Iterator[GuardedStream]:
    """Guard both streams while the block runs, and make every text printable on them; yield that of
    stdout."""
    out = sys.stdout or _closed(1)
    err = sys.stderr or _closed(2)
    for stream in (out, err):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    guard = GuardedStream(out, _end)
    guarded_out = cast(TextIO, guard)
    guarded_err = cast(TextIO, GuardedStream(err, lambda error: None))
    with redirect_stdout(guarded_out), redirect_stderr(guarded_err):
        try:
            yield guard
        finally:
            guarded_err.flush()


def _end(error: OSError) -> None:
    if error.errno == errno.EPIPE:
        raise SystemExit(ENDED_BY_SIGPIPE)
    raise IoError(
        "The output cannot be written to stdout",
        found=error.strerror or repr(error),
        todo="Free some space there, or send it elsewhere; --report writes the result to a file",
    ) from error


def _closed(descriptor: int) -> TextIO:
    """Return a stream that fails as one does that was closed before the program began.

    Its descriptor must not be left for a file of the bundle: anything may print to it.
    """
    _lead_nowhere(descriptor, os.O_RDONLY)
    return open(descriptor, "w", closefd=False)  # noqa: SIM115 (as long as the program runs)


def _lead_nowhere(descriptor: int, mode: int) -> None:
    nowhere = os.open(os.devnull, mode)
    if nowhere != descriptor:
        os.dup2(nowhere, descriptor)
        os.close(nowhere)
