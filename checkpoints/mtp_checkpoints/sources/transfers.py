"""Requests over a network: one that fails is made again, and a transfer goes on at the byte where
it stopped."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from mtp_checkpoints.errors import MtpExportError

# Of attempts that follow, at level INFO; records have the server and the attempt's number.
logger = logging.getLogger(__name__)

RETRIES = 5  # failed attempts in a row, without a byte in between
NAME_RETRIES = 1
FIRST_WAIT_SECONDS, MAX_WAIT_SECONDS = 0.5, 8.0
_MAX_TOLD_SECONDS = 600.0  # the Hub's windows of rate limits are 300 seconds long

Pause = Callable[[float], None]
Sink = Callable[[bytes], None]
T = TypeVar("T")


class AttemptFailed(Exception):
    """A request failed. error is what to tell the user if no other attempt succeeds.

    server: its name, or a bucket's. cause: the failure in a few words, without secrets. is_final:
    another one is of no use. told_seconds: how long the server asks to wait. is_unknown_name: the
    server's name cannot be looked up.
    """

    def __init__(
        self,
        error: MtpExportError,
        *,
        server: str,
        cause: str,
        is_final: bool = False,
        told_seconds: float = 0.0,
        is_unknown_name: bool = False,
    ) -> None:
        super().__init__(error.what)
        self.error, self.is_final, self.told_seconds = error, is_final, told_seconds
        self.server, self.cause, self.is_unknown_name = server, cause, is_unknown_name


class _Patience:
    """Waits between failed attempts; gives up after RETRIES of them without progress, and of a
    first request whose server's name is not known, after NAME_RETRIES."""

    def __init__(self, pause: Pause, *, is_under_way: bool = False) -> None:
        self._pause, self._failures, self._is_under_way = pause, 0, is_under_way

    def reset(self) -> None:
        """Note progress: the connection works."""
        self._failures = 0

    def after(self, failed: AttemptFailed) -> None:
        """Wait for the next attempt, or raise what to tell the user."""
        backoff = min(FIRST_WAIT_SECONDS * 2.0**self._failures, MAX_WAIT_SECONDS)
        self._failures += 1
        gives_up_early = failed.is_unknown_name and not self._is_under_way
        retries = min(NAME_RETRIES, RETRIES) if gives_up_early else RETRIES
        if failed.is_final or self._failures > retries:
            raise failed.error from failed.__cause__
        # Readers that failed together do not return together.
        seconds = failed.told_seconds + backoff * random.uniform(0.5, 1.0)
        seconds = min(seconds, _MAX_TOLD_SECONDS)
        attempt = self._failures + 1
        words = f"attempt {attempt} of {retries + 1} in {seconds:.1f} s"
        known = {"server": failed.server, "attempt": attempt}
        logger.info("%s: %s; %s", failed.server, failed.cause, words, extra=known)
        self._pause(seconds)


def patiently(attempt: Callable[[], T]) -> T:
    """Return what an attempt returns, made again while it raises AttemptFailed (MtpExportError)."""
    patience = _Patience(time.sleep)
    while True:
        try:
            return attempt()
        except AttemptFailed as failed:
            patience.after(failed)


def transfer(
    stream: Callable[[range], Iterator[bytes]], span: range, sink: Sink, pause: Pause
) -> None:
    """Give sink the bytes of a span in order, over as many attempts as it takes (MtpExportError).

    stream yields the bytes of a span, all of them unless it raises AttemptFailed.
    """
    patience = _Patience(pause, is_under_way=True)
    position = span.start
    while position < span.stop:
        try:
            for chunk in stream(range(position, span.stop)):
                sink(chunk)
                position += len(chunk)
                patience.reset()
        except AttemptFailed as failed:
            patience.after(failed)
