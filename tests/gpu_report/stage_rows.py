"""Rows of stages that go well and badly, for processes to make."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from benchmarks.gpu_report.stages import Row


def good(count: int) -> Iterator[Row]:
    for number in range(count):
        yield {"number": number, "process": os.getpid()}


def failing() -> Iterator[Row]:
    yield from good(1)
    raise ValueError("an illegal memory access was encountered")


def dying() -> Iterator[Row]:
    yield from good(1)
    os._exit(7)


def hanging() -> Iterator[Row]:
    yield from good(1)
    time.sleep(3600)
