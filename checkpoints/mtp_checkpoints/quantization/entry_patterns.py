"""Regular expressions in lists of a quantization_config, matched with names of modules as engines
do it, and for no longer than a moment."""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Callable
from functools import lru_cache

from mtp_checkpoints.errors import InvalidInputError

_MOST_SECONDS = 1.0  # of computing, for all names together: of one it takes microseconds
# A group that is repeated, or four repeats: only these can take so long.
_MAY_BE_SLOW = re.compile(r"\)\s*[*+{]|[*+{].*[*+{].*[*+{].*[*+{]", re.DOTALL)
_SHOWN = 100  # characters


class EntryPattern:
    """A regular expression, and the time that is left for it.

    `re` tries every way in which the repeats of one can share a name, and there may be more than
    could ever be tried. In another thread than the main one, where no signal ends it, it takes the
    time that it takes.
    """

    def __init__(self, text: str) -> None:
        self._compiled = re.compile(text)
        self._may_be_slow = _MAY_BE_SLOW.search(text) is not None
        self._seconds_left = _MOST_SECONDS

    def matches(self, name: str) -> bool:
        """Return whether it matches from a name's start (InvalidInputError if that takes too
        long)."""
        return self._found(self._compiled.match, name)

    def is_in(self, name: str) -> bool:
        """Return whether it matches anywhere in a name (InvalidInputError if that takes too
        long)."""
        return self._found(self._compiled.search, name)

    def _found(self, find: Callable[[str], object], name: str) -> bool:
        if not self._may_be_slow or threading.current_thread() is not threading.main_thread():
            return find(name) is not None
        if self._seconds_left <= 0:
            raise self._too_slow(name)
        started, before = time.thread_time(), signal.signal(signal.SIGVTALRM, _end)
        try:
            signal.setitimer(signal.ITIMER_VIRTUAL, self._seconds_left)
            return find(name) is not None
        except _EndedError:
            self._seconds_left = 0
            raise self._too_slow(name) from None
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, before)
            self._seconds_left -= time.thread_time() - started

    def _too_slow(self, name: str) -> InvalidInputError:
        return InvalidInputError(
            "config.json's quantization has a regular expression that takes too long to match:"
            " engines would never have loaded the model",
            expected="one that is matched with a module's name in a moment",
            found=f"{self._compiled.pattern[:_SHOWN]} for {name[:_SHOWN]}",
            todo="Write it without a repeat of what repeats itself, as (a+)+",
        )


class _EndedError(Exception):
    pass


def _end(*_: object) -> None:
    raise _EndedError


@lru_cache(4096)
def entry_pattern(text: str) -> EntryPattern:
    """Return the pattern of an entry (re.error); lists of hundreds are more than `re` keeps."""
    return EntryPattern(text)
