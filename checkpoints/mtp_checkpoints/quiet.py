"""Libraries kept from printing what their callers already handle, or users can do nothing about."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quieted(logger_name: str, level: int) -> Iterator[None]:
    """Drop records of a library's logger below a level, and all warnings, while the block runs."""
    logger = logging.getLogger(logger_name)
    before = logger.level
    logger.setLevel(level)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)
