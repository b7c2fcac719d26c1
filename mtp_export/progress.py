"""Progress as a callback, and sizes for people."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol


class ProgressCallback(Protocol):
    """Takes the bytes just done; callable from any thread."""

    def __call__(self, done_bytes: int) -> None: ...


# Opens the progress bar of a step of a number of bytes; the callback takes the bytes just done.
ShowProgress = Callable[[str, int], AbstractContextManager[ProgressCallback]]


def silent(done_bytes: int) -> None:
    """Progress that is not shown."""


def format_bytes(count: float) -> str:
    """Return a number of bytes for people, in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"
