"""Bump allocator of memory for numbers: from cache lines on, in huge pages where there is much."""

from __future__ import annotations

import math
import threading

import numpy as np

LINE_BYTES = 64
LINE = LINE_BYTES // 4  # floats of a cache line
CHUNK_FLOATS = 1 << 23  # 32 MB


def floats(count: int) -> np.ndarray:
    """Return uninitialised float32 memory [count] that begins at a cache line.

    numpy asks the system for huge pages from 4 MB on; torch does not, and then a model has more
    pages than a core's page lookup buffer holds.
    """
    raw = np.empty(4 * count + LINE_BYTES, np.uint8)
    start = -raw.ctypes.data % LINE_BYTES
    return raw[start : start + 4 * count].view(np.float32)


class Arena:
    """Bump allocator: arrays side by side, each from a cache line on.

    memory: float32, of which all are taken; None: large chunks, as many as are needed. is_filled:
    what is taken holds what an earlier process wrote to it, and numbers are those that it noted.
    """

    def __init__(self, memory: np.ndarray | None = None) -> None:
        self._chunk = floats(0) if memory is None else memory
        self._grows = memory is None
        self._taking = threading.Lock()

    @property
    def is_filled(self) -> bool:
        return False

    def noted(self, number: int) -> int:
        """Return a number that says how what is taken is read: in an arena that is filled, the next
        of those that were noted."""
        return number

    def take(self, *shape: int, dtype: type[np.generic] = np.float32) -> np.ndarray:
        """Return uninitialised memory of a dtype of at most four bytes.

        Threads may call this at the same time. Raises ValueError where given memory is too small.
        """
        entries = math.prod(shape)
        count = -(-entries * np.dtype(dtype).itemsize // 4)
        size = -(-count // LINE) * LINE
        with self._taking:
            if size > len(self._chunk):
                if not self._grows:
                    raise ValueError(f"memory: expected {size} floats, found {len(self._chunk)}")
                self._chunk = self._more(size)
            place, self._chunk = self._chunk[:count], self._chunk[size:]
        return place.view(dtype)[:entries].reshape(shape)

    def _more(self, count: int) -> np.ndarray:
        """Return a new chunk of at least a number of floats."""
        return floats(max(count, CHUNK_FLOATS))
