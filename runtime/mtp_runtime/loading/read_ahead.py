"""Reading ahead of what computes: a few threads read what comes next, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Executor, Future
from typing import TypeVar

Item = TypeVar("Item")
Read = TypeVar("Read")

READERS = 8  # reads at a time that a disk of today needs to be busy


def read_ahead(
    pool: Executor, read: Callable[[Item], Read], items: Iterable[Item], ahead: int = READERS
) -> Generator[Read]:
    """Yield read(item) of each item in order, while up to `ahead` of those after it are read.

    Nothing is kept that was yielded, and nothing more is read once the generator is closed.
    """
    waiting: deque[Future[Read]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(read, item))
            if len(waiting) > ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()
