"""Size of a cache that keeps a run within a limit of memory: resident, or of a GPU."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from mtp_export.errors import ResourceError, UsageError
from mtp_runtime.cache import PageAllocator
from mtp_runtime.models.model import Model

_FOR_CACHE = 0.9  # of what the model leaves; the rest is for what a step computes


def cache_tokens_within(max_memory_bytes: int, model: Model, page_size: int) -> int:
    """Return how many tokens of cache a loaded model leaves room for, on its device.

    Raises ResourceError where it leaves none, UsageError for a device whose memory is not known.
    """
    used = used_bytes(model.device)
    one = model.new_cache(PageAllocator(1, page_size))
    page_bytes = sum(tensor.numel() * tensor.element_size() for tensor in one.tensors)
    pages = int((max_memory_bytes - used) * _FOR_CACHE) // page_bytes
    if pages < 1:
        raise ResourceError(
            "The model leaves no memory for the cache",
            expected=f"more than {used + page_bytes} bytes",
            found=f"{max_memory_bytes} bytes",
            todo="Raise --max-memory",
        )
    return pages * page_size


def bound_device(device: torch.device, max_memory_bytes: int) -> None:
    """Let no more than this be allocated on a GPU by this process; main memory has no such bound.

    torch raises OutOfMemoryError where more is wanted.
    """
    if device.type == "cuda":
        total_bytes = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, max_memory_bytes / total_bytes), device)


def used_bytes(device: torch.device) -> int:
    """Return what this process holds: its resident memory, or tensors on a GPU."""
    if device.type == "cpu":
        return resident_bytes()
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    raise UsageError(
        "A limit of memory is for a model on a CPU or a GPU",
        found=device,
        todo="Give the cache's size in tokens instead",
    )


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
