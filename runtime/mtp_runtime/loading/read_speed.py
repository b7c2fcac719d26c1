"""Speed at which a disk gives what a run reads from it: many tensors, past the page cache."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from mtp_checkpoints.containers.base import TensorInfo
from mtp_checkpoints.sources.direct_io import MIN_DIRECT_BYTES
from mtp_checkpoints.tensors.tensor_reader import TensorReader
from mtp_runtime.loading.on_demand import READERS

PROBE_BYTES = 256 << 20


def read_speed(tensors: Sequence[TensorInfo], least_bytes: int = MIN_DIRECT_BYTES) -> float | None:
    """Return the bytes per second at which several threads read tensors, some that lie far apart;
    None where all are so small that they tell nothing (IoError)."""
    large = [tensor for tensor in tensors if tensor.size_bytes >= least_bytes]
    if not large:
        return None
    count = max(1, PROBE_BYTES // max(tensor.size_bytes for tensor in large))
    chosen = large[:: max(1, len(large) // count)][:count]
    start = time.perf_counter()
    with ThreadPoolExecutor(READERS) as pool:
        read_bytes = sum(pool.map(_read, chosen))
    return read_bytes / (time.perf_counter() - start)


def _read(tensor: TensorInfo) -> int:
    """Read a tensor past the page cache; return its bytes."""
    with TensorReader(tensor, once=True) as reader:
        return int(reader.rows(0, tensor.shape[0]).nbytes)
