"""Memory on the CPU that begins at a cache line and lies in huge pages where it is large."""

from __future__ import annotations

import threading

import numpy as np
import torch

LINE_BYTES = 64
LINE = LINE_BYTES // 4  # floats of a cache line
CHUNK_FLOATS = 1 << 23  # 32 MB


def floats(count: int) -> np.ndarray:
    """float32 memory that holds anything. numpy asks the system for huge pages from 4 MB on; torch
    does not, and then a model has more pages than a core can look up without going to memory."""
    raw = np.empty(4 * count + LINE_BYTES, np.uint8)
    start = -raw.ctypes.data % LINE_BYTES
    return raw[start : start + 4 * count].view(np.float32)


class Arena:
    """float32 tensors side by side in large pieces of memory, each from a cache line on."""

    def __init__(self) -> None:
        self._chunk = floats(0)
        self._taking = threading.Lock()

    def keep(self, values: torch.Tensor) -> torch.Tensor:
        """A contiguous copy of the values."""
        place = self._take(values.numel()).reshape(values.shape)
        np.copyto(place, values.numpy())
        return torch.from_numpy(place)

    def _take(self, count: int) -> np.ndarray:
        size = -(-count // LINE) * LINE
        with self._taking:
            if size > len(self._chunk):
                self._chunk = floats(max(size, CHUNK_FLOATS))
            place, self._chunk = self._chunk[:count], self._chunk[size:]
        return place
