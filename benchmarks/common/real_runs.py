"""Models of real sizes: their random weights, and what these take to be read and decoded with."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mtp_checkpoints.dtypes import OutputTensor

TOKENS = 32  # that are decoded
CACHE_TOKENS = 16384  # room for the states of every batch too
READ_ELEMENTS = 1 << 27
POOL_BYTES = 64 << 20


def read_seconds(folder: Path, drafts: bool) -> float:
    """Return the seconds of reading the files of a bundle into new memory, one after the other."""
    begun, pattern = time.perf_counter(), f"{'m*' if drafts else 'main'}/*.safetensors"
    kept = [np.fromfile(file, np.uint8) for file in folder.glob(pattern)]
    took = time.perf_counter() - begun
    assert kept
    return took


def stored_bytes(path: Path) -> int:
    """Return the bytes of a file, or of the shards in a folder of folders."""
    files = [path] if path.is_file() else path.glob("main/*.safetensors")
    return sum(file.stat().st_size for file in files)


def read_bandwidth() -> float:
    """Return the bytes per second of torch's sum of integers by all threads, the best of five."""
    numbers, best = torch.ones(READ_ELEMENTS, dtype=torch.int64), 0.0
    for _ in range(5):
        begun = time.perf_counter()
        numbers.sum()
        best = max(best, numbers.nbytes / (time.perf_counter() - begun))
    return best


def random_content(tensor: OutputTensor) -> Iterator[memoryview]:
    """Yield random codes, and scales and weights with which a stream keeps its size."""
    if tensor.name.endswith("_scale"):
        kind = "scales of groups" if tensor.shape[1] > 1 else "scales of rows"
    elif len(tensor.shape) == 1 and tensor.dtype != "BF16":
        kind = "bias"
    elif len(tensor.shape) == 1 and not tensor.name.endswith("bias"):
        kind = "norm"
    else:
        kind = "weight" if tensor.dtype == "BF16" else "codes"
    pool = _pool(kind)
    start = zlib.crc32(tensor.name.encode()) % (len(pool) // 2) // 64 * 64
    left = tensor.size_bytes
    while left:
        piece = pool[start : start + left]
        yield memoryview(piece)
        left, start = left - len(piece), 0


@cache
def _pool(kind: str) -> np.ndarray[Any, Any]:
    """Return the bytes of random values of a kind."""
    generator = torch.Generator().manual_seed(0)
    if kind == "codes":
        return torch.randint(0, 256, (POOL_BYTES,), dtype=torch.uint8, generator=generator).numpy()
    values = torch.randn(POOL_BYTES // 4, generator=generator)
    if kind == "bias":
        return (0.1 * values).view(torch.uint8).numpy()
    middle, width = {
        "scales of groups": (0.005, 0.0002),
        "scales of rows": (0.0003, 0.00001),
        "norm": (1.0, 0.1),
        "weight": (0.0, 0.02),
    }[kind]
    return (middle + width * values).bfloat16().view(torch.uint8).numpy()
