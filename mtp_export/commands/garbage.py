"""Garbage collection while a checkpoint's tensors are listed, and while modules are imported."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_NEW_OBJECTS = 1_000_000
_REPORTS_LEAKS = "triton._C.libtriton"


@contextmanager
def gc_paused() -> Iterator[None]:
    """Collect garbage rarely while the block runs, and never what it made.

    Half a million small objects that all stay in use are made of a large checkpoint's headers, or
    of torch's modules; with the usual thresholds they are looked through again and again. Of the
    program's own modules that is a twentieth of their time.
    """
    before = gc.get_threshold()
    gc.set_threshold(_NEW_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.freeze()
        gc.set_threshold(*before)


def unfreeze_for_the_end() -> None:
    """Let Python's end collect what gc_paused kept, where Triton is loaded, which calls every
    object of its own that is left a leak, on stderr. Elsewhere the program ends sooner without."""
    if _REPORTS_LEAKS in sys.modules:
        gc.unfreeze()
