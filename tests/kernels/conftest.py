"""Fixtures that tests of kernels share."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator

import pytest

_M_PERTURB = -6  # of glibc's mallopt
_PATTERN = 0xA5


@pytest.fixture(autouse=True)
def overwritten_when_freed() -> Iterator[None]:
    """Have the C library overwrite memory that is freed: what a kernel reads by an address after
    its array's last use is wrong, not right by chance."""
    if not sys.platform.startswith("linux"):
        yield
        return
    library = ctypes.CDLL(None)
    library.mallopt(_M_PERTURB, _PATTERN)
    yield
    library.mallopt(_M_PERTURB, 0)
