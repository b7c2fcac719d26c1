"""Announcement on stderr that a request over a network failed and is made again."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from mtp_export.commands.compiling import listening
from mtp_export.commands.output import remark

_LOGGER = "mtp_checkpoints.sources.transfers"  # by its name: most commands need no network


class _Announcer(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        """Say why a request failed, and when it is made again."""
        remark(record.getMessage())


@contextmanager
def announced_retries(*, quiet: bool) -> Iterator[None]:
    """Announce requests that are made again while the block runs, unless quiet."""
    if quiet:
        yield
        return
    with listening(_LOGGER, _Announcer()):
        yield
