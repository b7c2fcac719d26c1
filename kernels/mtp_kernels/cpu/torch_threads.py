"""Torch's own threads, turned off where they only cost time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

_LEAST_HIDDEN_FOR_THREADS = 1024


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Compute without torch's own threads: workers are the parallelism."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def torch_threads_for(hidden_size: object) -> AbstractContextManager[None]:
    """Compute without torch's own threads where a second one only costs time, on small matrices."""
    small = type(hidden_size) is int and hidden_size < _LEAST_HIDDEN_FOR_THREADS
    return one_torch_thread() if small else nullcontext()
