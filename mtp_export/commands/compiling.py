"""Announcement on stderr that kernels are being compiled, which a machine does once."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from mtp_export.commands.output import remark

_LOGGER = "mtp_kernels.cpu.jit"  # by its name: importing it takes longer than most commands
_SECONDS_BETWEEN_LINES = 5.0


class _Announcer(logging.Handler):
    """Says at the first function that kernels are compiled, and every few seconds how many were."""

    def __init__(self) -> None:
        super().__init__()
        self._functions = 0
        self._last = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        """Count a function."""
        now = time.monotonic()
        if not self._functions:
            remark("Compiling the kernels for this machine, which is done once.")
            self._last = now
        elif now - self._last > _SECONDS_BETWEEN_LINES:
            remark(f"Compiling the kernels: {self._functions} functions so far.")
            self._last = now
        self._functions += 1


@contextmanager
def announced_compiling() -> Iterator[None]:
    """Announce kernels that are compiled while the block runs."""
    with listening(_LOGGER, _Announcer()):
        yield


@contextmanager
def listening(name: str, handler: logging.Handler) -> Iterator[None]:
    """Give a handler what the logger of a name logs at level INFO while the block runs."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
