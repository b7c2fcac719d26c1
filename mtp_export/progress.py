"""Progress as a callback, and sizes and numbers for people."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class ProgressCallback(Protocol):
    """Takes the bytes just done; callable from any thread."""

    def __call__(self, done_bytes: int) -> None: ...


# Opens the progress bar of a step of a number of bytes; the callback takes the bytes just done.
ShowProgress = Callable[[str, int], AbstractContextManager[ProgressCallback]]


# Opens the progress bar of a step by its title, a number and the unit of what is counted; the
# callback takes how many more are done.
CountCallback = Callable[[int], object]
ShowCount = Callable[[str, int, str], AbstractContextManager[CountCallback]]


@contextmanager
def uncounted(title: str, total: int, unit: str) -> Iterator[CountCallback]:
    """Count a step that is not shown."""
    yield int


def silent(done_bytes: int) -> None:
    """Progress that is not shown."""


def format_bytes(count: float) -> str:
    """Return a number of bytes for people, in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


def counted(count: int, unit: str) -> str:
    """Return a number of things for people: 1 shard, 2 shards."""
    return f"{count:,} {unit}{'' if count == 1 else 's'}"


def shortened(names: Sequence[str], most: int, separator: str = ", ") -> str:
    """Return the first of many names or sentences, and how many more there are."""
    shown, more = separator.join(names[:most]), len(names) - most
    return f"{shown}{separator.rstrip(' ,')} and {more:,} more" if more > 0 else shown


def format_binary(count: float) -> str:
    """Return a number of bytes for people, in powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"
