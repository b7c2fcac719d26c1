"""Runs of models of real sizes: how long they decode, and what their files take to be read."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

TOKENS = 32  # that are decoded
CACHE_TOKENS = 16384  # room for the states of every batch too


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
