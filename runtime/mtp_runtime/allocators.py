"""Allocators of an engine's pages and states, by what its model keeps of a sequence."""

from __future__ import annotations

from mtp_checkpoints.errors import UnsupportedError
from mtp_runtime.cache import PageAllocator
from mtp_runtime.config import EngineConfig
from mtp_runtime.prefix_cache import SharedPages
from mtp_runtime.prefix_states import SharedStates


def allocator_for(
    config: EngineConfig, *, modules: int, state_pages: int, with_spare: bool
) -> PageAllocator:
    """Make the allocator of an engine's pages, and of states where layers keep some, each of the
    memory of so many pages.

    modules: MTP modules of the model. Raises UnsupportedError for a prefix cache that does not keep
    what they need.
    """
    if config.prefix_cache and modules > 1:
        raise UnsupportedError(
            "The prefix cache does not keep what several MTP modules need",
            expected="one MTP module at most",
            found=modules,
            todo="Leave the prefix cache out, or use --speculate-method none",
        )
    pages, shares = config.cache_tokens // config.page_size, config.prefix_cache
    if not state_pages:
        make = SharedPages if shares else PageAllocator
        return make(pages, config.page_size, with_spare=with_spare)
    keep = SharedStates if shares else PageAllocator
    return keep(
        pages,
        config.page_size,
        with_spare=with_spare,
        states=config.max_batch_size,
        state_pages=state_pages,
        drafts=config.speculation.draft_tokens,
    )
