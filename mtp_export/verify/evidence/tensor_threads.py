"""Work on many tensors in several threads: results in order, no thread left running."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

# One computes, while the other opens its files and waits for the first bytes.
THREADS_PER_WORKER = 2

Task = TypeVar("Task")
Result = TypeVar("Result")


def in_threads(
    work: Callable[[Task], Result],
    tasks: Sequence[Task],
    *,
    workers: int,
    size_bytes: Callable[[Task], int],
) -> Iterator[Result]:
    """Yield work(task) of every task, in order; the first failure, or Ctrl-C, drops the rest.

    The largest tasks begin first, so that none is left to one thread at the end.
    """
    pool = ThreadPoolExecutor(THREADS_PER_WORKER * max(1, workers))
    try:
        begun = {
            number: pool.submit(work, tasks[number])
            for number in sorted(range(len(tasks)), key=lambda at: -size_bytes(tasks[at]))
        }
        for number in range(len(tasks)):
            yield begun.pop(number).result()
    finally:
        pool.shutdown(cancel_futures=True)
