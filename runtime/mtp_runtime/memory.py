"""Size of a cache that keeps a run within a limit of memory: resident, or of a GPU."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import torch

from mtp_checkpoints.errors import ResourceError, UsageError
from mtp_checkpoints.free_memory import free_memory
from mtp_runtime.cache import PageAllocator
from mtp_runtime.models.memory_plan import FOR_CACHE, MemoryPlan, PageSizes
from mtp_runtime.models.model import Model

logger = logging.getLogger(__name__)


class Tensors(Protocol):
    """Tensors of a cache."""

    @property
    def tensors(self) -> Iterable[torch.Tensor]: ...


class Cached(Protocol):
    """A model or a draft that keeps something of every token."""

    def new_cache(self, pages: PageAllocator) -> Tensors:
        """Make a cache with room for all pages."""


def cache_tokens_within(
    max_memory_bytes: int,
    device: torch.device,
    cached: Sequence[Cached],
    page_size: int,
    kept_bytes: int = 0,
) -> int:
    """Return how many tokens of cache there is room for beside what was loaded on a device.
    kept_bytes are for others.

    Raises as cache_tokens_beside, UsageError for a device whose memory is not known.
    """
    used = used_bytes(device) + kept_bytes
    page_bytes = bytes_per_page(cached, page_size)
    return cache_tokens_beside(used, max_memory_bytes, page_bytes=page_bytes, page_size=page_size)


def cache_tokens_beside(
    used_bytes: int, max_memory_bytes: int, *, page_bytes: int, page_size: int
) -> int:
    """Return how many tokens of cache there is room for beside what is used; page_bytes are those
    of page_size tokens in all caches.

    Raises ResourceError where there is no room.
    """
    count = _pages_beside(used_bytes, max_memory_bytes, page_bytes)
    if count < 1:
        raise ResourceError(
            "The model leaves no memory for the cache",
            expected=f"more than {used_bytes + page_bytes} bytes",
            found=f"{max_memory_bytes} bytes",
            todo="Raise --max-memory",
        )
    return count * page_size


def cache_tokens_free(most: int, *, page_bytes: int, page_size: int, unread_bytes: int = 0) -> int:
    """Return how many tokens of cache main memory has room for now, at most some; unread_bytes are
    those of what is yet to be loaded.

    Raises ResourceError where there is no room.
    """
    free = min(free_memory().values(), default=None)
    if free is None:
        return most
    room = cache_tokens_beside(unread_bytes, free, page_bytes=page_bytes, page_size=page_size)
    tokens = min(most, room)
    if tokens < most:
        logger.warning("The cache has room for %d tokens, not for %d: memory is full", tokens, most)
    return tokens


def fits_beside(used_bytes: int, max_memory_bytes: int, page_bytes: int) -> bool:
    """Return whether there is room for any cache beside what is used."""
    return _pages_beside(used_bytes, max_memory_bytes, page_bytes) >= 1


def _pages_beside(used_bytes: int, max_memory_bytes: int, page_bytes: int) -> int:
    return int((max_memory_bytes - used_bytes) * FOR_CACHE) // page_bytes


def with_expert_cache(
    plan: MemoryPlan,
    sizes: PageSizes,
    *,
    used_bytes: int,
    max_memory_bytes: int,
) -> tuple[MemoryPlan, int]:
    """Return the plan with as many routed experts in memory as a limit leaves room for, and the
    tokens of cache beside them, as MemoryPlan.with_expert_cache.

    Raises ResourceError where not even the experts of one token in one layer fit.
    """
    cached = plan.with_expert_cache(max_memory_bytes - used_bytes, sizes)
    if cached is not None:
        return cached
    experts = plan.experts
    assert experts is not None, "a model with routed experts"
    least, usual = (
        _mb(used_bytes + plan.bytes_with_experts(picks, sizes))
        for picks in (experts.layer_picks, 2 * experts.row_picks)
    )
    raise ResourceError(
        "The model does not fit into --max-memory, not even with its routed experts on disk",
        expected=f"{least} at least, and {usual} to hold the experts of two tokens: what every"
        f" token uses takes {_mb(plan.always_bytes)}",
        found=f"--max-memory of {_mb(max_memory_bytes)}",
        todo="No weight was read. Raise --max-memory, or leave the MTP module out by"
        " --speculate-method none",
    )


def bytes_per_page(cached: Sequence[Cached], page_size: int) -> int:
    """Return the size of one page in the caches of a model and its drafts together."""
    pages = PageAllocator(1, page_size)
    return sum(
        tensor.numel() * tensor.element_size()
        for part in cached
        for tensor in part.new_cache(pages).tensors
    )


def state_pages(model: Model, page_size: int) -> int:
    """Return how many pages of its cache the state of a sequence has the memory of, 0 without."""
    if not model.config.state_elements:
        return 0
    state_bytes = model.config.state_elements * torch.float32.itemsize
    return -(-state_bytes // max(1, bytes_per_page((model,), page_size)))


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


def _mb(size: int) -> str:
    """Return a size in words, rounded up."""
    return f"{math.ceil(size / 1e6):,} MB"
