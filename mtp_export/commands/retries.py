"""Announcement on stderr that a request over a network failed and is made again."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from mtp_export.commands.compiling import listening
from mtp_export.commands.output import remark

_LOGGER = "mtp_checkpoints.sources.transfers"  # by its name: most commands need no network
_SECONDS_OF_ONE_FAILURE = 30.0  # in which the readers of one server fail one after the other


class _Announcer(logging.Handler):
    """Says once what all readers of a server met together."""

    def __init__(self) -> None:
        super().__init__()
        self._told: dict[tuple[str, int], float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Say why a request failed and when it is made again, unless the same attempt at the same
        server was just told."""
        known, now = vars(record), time.monotonic()
        attempt = known["server"], known["attempt"]
        before = self._told.get(attempt)
        if before is None or now - before > _SECONDS_OF_ONE_FAILURE:
            self._told[attempt] = now
            remark(record.getMessage())


@contextmanager
def announced_retries(*, quiet: bool) -> Iterator[None]:
    """Announce requests that are made again while the block runs, unless quiet."""
    if quiet:
        yield
        return
    with listening(_LOGGER, _Announcer()):
        yield
