"""Work on many tensors in several threads: results in order, no thread left running."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Task = TypeVar("Task")
Result = TypeVar("Result")


def in_threads(
    work: Callable[[Task], Result], tasks: Sequence[Task], workers: int
) -> Iterator[Result]:
    """Yield work(task) of every task, in order; the first failure, or Ctrl-C, drops the rest."""
    pool = ThreadPoolExecutor(max(1, workers))
    try:
        yield from pool.map(work, tasks)
    finally:
        pool.shutdown(cancel_futures=True)
