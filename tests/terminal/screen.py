"""The program in a pseudo-terminal and in pipes, and what people see of it there."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import struct
import termios
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from rich.cells import cell_len

from forked import Forked, Pipe, environment_of, program

_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\].*?(?:\x07|\x1b\\)|[@-_])")


@dataclass(frozen=True)
class Seen:
    """Output of a finished program, escapes included, and its exit code."""

    code: int
    raw: str

    @property
    def escapes(self) -> list[str]:
        """Escape sequences, in their order."""
        return _ESCAPE.findall(self.raw)

    @property
    def states(self) -> list[str]:
        """States of the lines on the screen, those that were overwritten included."""
        return re.split(r"[\r\n]+", _ESCAPE.sub("", self.raw).rstrip())

    @property
    def lines(self) -> list[str]:
        """Lines as they are at the end: what a carriage return began anew is overwritten."""
        plain = _ESCAPE.sub("", self.raw).replace("\r\n", "\n")
        return [
            line.rstrip("\r").rpartition("\r")[2].rstrip() for line in plain.rstrip().split("\n")
        ]

    @property
    def text(self) -> str:
        """The lines as one text."""
        return "\n".join(self.lines)

    @property
    def as_a_shell_reads(self) -> str:
        """The text with each command in one line."""
        return re.sub(r" \\\n +", " ", self.text)

    def wider_than(self, columns: int) -> list[str]:
        """States of lines that a terminal would break."""
        return [state for state in self.states if cell_len(state) > columns]


class Terminal:
    """A pseudo-terminal in which the program runs, as stdin, stdout and stderr.

    environment: variables that are added to those of the tests.
    """

    def __init__(
        self,
        *arguments: object,
        columns: int = 80,
        rows: int = 24,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> None:
        self._ours, theirs = os.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self._written = b""
        self._process = Forked(
            program,
            *arguments,
            streams=(theirs, theirs, theirs),
            environment=environment_of({"TERM": "xterm-256color", **(environment or {})}),
            folder=folder,
        )
        os.close(theirs)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        os.close(self._ours)

    @property
    def raw(self) -> str:
        """Text that was written until now."""
        return self._written.decode(errors="replace")

    def wait_for(self, words: str, seconds: float = 120.0) -> None:
        """Wait until words were written (AssertionError where they never are)."""
        end = time.monotonic() + seconds
        while words not in _ESCAPE.sub("", self.raw):
            has_ended = self._process.poll() is not None and not self._reader.is_alive()
            assert not has_ended and time.monotonic() < end, f"no {words!r} in {self.raw!r}"
            time.sleep(0.02)

    def press(self, keys: str) -> None:
        """Type keys; "\\x03" is Ctrl-C."""
        os.write(self._ours, keys.encode())

    def finish(self, seconds: float = 240.0) -> Seen:
        """Wait for the end of the program, and return what it wrote."""
        code = self._process.wait(seconds)
        self._reader.join(seconds)
        return Seen(code, self.raw)

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # Linux's way to say that the other end was closed
            while data := os.read(self._ours, 4096):
                self._written += data


def in_terminal(
    *arguments: object,
    columns: int = 80,
    rows: int = 24,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> Seen:
    """Run the program in a terminal to its end."""
    with Terminal(
        *arguments, columns=columns, rows=rows, environment=environment, folder=folder
    ) as terminal:
        return terminal.finish()


def in_pipe(
    *arguments: object,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> Seen:
    """Run the program with stdout and stderr in one pipe, as in `mtp-export ... 2>&1 | less`."""
    pipe = Pipe()
    process = Forked(
        program,
        *arguments,
        streams=(0, pipe, pipe),
        environment=environment_of(environment or {}),
        folder=folder,
    )
    raw = pipe.read()
    return Seen(process.wait(), raw)
