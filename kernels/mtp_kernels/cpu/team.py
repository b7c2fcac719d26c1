"""Team of threads that run one compiled function together, and wait for each other inside it.

A launch from Python costs tens of microseconds, a `wait` between running threads less than one: a
whole forward pass is one launch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from mtp_kernels.cpu.jit import inner
from mtp_kernels.cpu.vectors import address

THREAD_WORK = 1 << 20  # multiplications that are worth waking a thread for
SPINS = 2000  # before a waiting thread gives its core to others

_INT = ir.IntType(64)
_yield = types.ExternalFunction("sched_yield", types.int32())


class Member(NamedTuple):
    """One thread of a team of `count`; `arrived` [1] counts the waits of all of them."""

    number: Any
    count: Any
    arrived: Any


@intrinsic
def _add(typing: Any, at: Any) -> Any:
    """Atomically add 1 to the int64 at an address; return the value before."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], _INT.as_pointer())
        return builder.atomic_rmw("add", pointer, ir.Constant(_INT, 1), "seq_cst")

    return types.int64(types.int64), codegen


@intrinsic
def _read(typing: Any, at: Any) -> Any:
    """Return the int64 at an address, in order with all writes before it."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], _INT.as_pointer())
        return builder.load_atomic(pointer, "seq_cst", 8)

    return types.int64(types.int64), codegen


@inner
def wait(member: Any) -> None:
    """Return when every thread of the team has called this."""
    if member.count == 1:
        return
    at = address(member.arrived)
    goal = (_add(at) // member.count + 1) * member.count
    spins = 0
    while _read(at) < goal:
        spins += 1
        if spins > SPINS:
            _yield()


@inner
def share(member: Any, items: Any) -> tuple[Any, Any]:
    """Return the member's range [first, last) of equally expensive items."""
    return member.number * items // member.count, (member.number + 1) * items // member.count


@inner
def owns(member: Any, done: Any, cost: Any, total: Any) -> Any:
    """Return True where an item is the member's, of items that cost `total` together.

    `done` is the cost of the items before it. The line of all costs is cut into equal parts; an
    item belongs to the part that its middle lies in.
    """
    return (2 * done + cost) * member.count // (2 * total) == member.number


class Team:
    """Threads for compiled functions whose first argument is a Member; they run one at a time."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._workers = 0
        self._busy = threading.Lock()

    @staticmethod
    def threads_for(multiplications: int) -> int:
        """Return torch's number of threads, or fewer where waking them costs more than it saves."""
        return max(1, min(torch.get_num_threads(), multiplications // THREAD_WORK))

    def run(self, function: Callable[..., None], threads: int, *arguments: Any) -> None:
        """Run function(member, *arguments) on `threads` threads, the calling one included."""
        arrived = np.zeros(1, np.int64)
        if threads == 1:
            function(Member(0, 1, arrived), *arguments)
            return
        with self._busy:  # two teams with half of the threads each would wait for ever
            futures = [
                self._threads(threads - 1).submit(
                    function, Member(number, threads, arrived), *arguments
                )
                for number in range(1, threads)
            ]
            function(Member(0, threads, arrived), *arguments)
            for future in futures:
                future.result()

    def _threads(self, workers: int) -> ThreadPoolExecutor:
        if self._pool is None or workers > self._workers:
            self._pool, self._workers = ThreadPoolExecutor(workers), workers
        return self._pool


@cache
def process_team() -> Team:
    """Return the threads that all compiled kernels of this process share."""
    return Team()
