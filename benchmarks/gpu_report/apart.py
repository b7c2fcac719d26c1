"""Rows that a process of its own makes: one that hangs is ended, and a GPU that met an error in one
answers the next."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.gpu_report.stages import OutOfTime, Row

ROW_SECONDS = 100.0  # that a row may take, the start of its stage and kernels compiled included


def rows_apart(
    make: Callable[..., Iterator[Row]],
    arguments: tuple[Any, ...],
    *,
    seconds_left: Callable[[], float],
    row_seconds: float = ROW_SECONDS,
) -> Iterator[Row]:
    """Yield make(*arguments) as a process makes it, which both must be picklable for.

    Raises RuntimeError for a process that fails, TimeoutError for a row that takes longer than
    row_seconds, OutOfTime for one that is not there when no seconds are left; the process ends with
    this generator.
    """
    context = multiprocessing.get_context("spawn")  # a fork would share this process's GPU
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(theirs, make, arguments))
    process.start()
    theirs.close()
    try:
        while True:
            left = max(0.0, seconds_left())
            if not ours.poll(min(left, row_seconds)):
                if left < row_seconds:
                    raise OutOfTime
                raise TimeoutError(f"no row in {row_seconds:.0f} seconds; its process was ended")
            try:
                row, error = ours.recv()
            except EOFError:
                process.join()
                raise RuntimeError(f"the process ended with code {process.exitcode}") from None
            if error:
                raise RuntimeError(error)
            if row is None:
                return
            yield row
    finally:
        process.kill()
        process.join()


def _send(connection: Connection, make: Callable[..., Iterator[Row]], arguments: Any) -> None:
    try:
        for row in make(*arguments):
            connection.send((row, None))
        connection.send((None, None))
    except BaseException:
        connection.send((None, traceback.format_exc()))


@contextmanager
def compiling_processes() -> Iterator[Executor]:
    """Give processes that compile; what they have not begun at the end they leave."""
    processes = ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn"))
    try:
        yield processes
    finally:
        processes.shutdown(wait=False, cancel_futures=True)
