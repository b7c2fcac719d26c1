"""Standard output and standard error, either of which may go away while the program runs.

Without a reader of its output the program ends quietly, as one that SIGPIPE ends; output that
cannot be written for another reason is a failure. Losing standard error never ends a run.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from io import TextIOWrapper
from typing import Any, TextIO, cast

from mtp_checkpoints.errors import IoError

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
