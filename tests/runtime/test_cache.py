"""The paged cache: append, truncate, no trace of what was cut off, no sight of the future."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_export.errors import ResourceError
from mtp_runtime.cache import CachedSequence, LayerCaches, PageAllocator
from runtime.harness import Walk, load, prompts_of


def allocator_of(pages: int, page_size: int) -> PageAllocator:
    allocator = PageAllocator(pages, page_size)
    spec = allocator.spec(torch.float32, torch.device("cpu"))
    allocator.poison_freed(LayerCaches(((spec.empty(2), spec.empty()),)))
    return allocator


def test_a_full_cache_is_refused_and_unchanged() -> None:
    cache, sequence = allocator_of(2, 4), CachedSequence()
    cache.append(sequence, 5)
    with pytest.raises(ResourceError, match="no page left"):
        cache.append(sequence, 4)
    assert (sequence.length, cache.free_pages) == (5, 0)
    cache.append(sequence, 3)
    cache.truncate(sequence, 4)
    assert (sequence.length, len(sequence.pages), cache.free_pages) == (4, 1, 1)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 12)), max_size=40), st.integers(1, 5))
def test_pages_belong_to_one_sequence(steps: list[tuple[int, int]], page_size: int) -> None:
    cache = allocator_of(6, page_size)
    sequences = [CachedSequence() for _ in range(3)]
    for which, length in steps:
        sequence = sequences[which]
        if length <= sequence.length:
            cache.truncate(sequence, length)
        elif cache.missing_pages(sequence, length) <= cache.free_pages:
            cache.append(sequence, length - sequence.length)
        held = [page for each in sequences for page in each.pages]
        assert len(held) == len(set(held)) == cache.pages - cache.free_pages
        for each in sequences:
            assert len(each.pages) == cache.pages_for(each.length)
            assert len(set(cache.slots(each, 0, each.length))) == each.length


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("cut", [1, 15, 16, 17, 30])
def test_truncation_leaves_no_trace(small: Path, compiled: bool, cut: int) -> None:
    """Tokens cut off are poisoned with NaN; going on gives the bits of never having had them."""
    model = load(small, compiled=compiled)
    tokens, others = prompts_of([40, 40], 96)
    walk, clean = Walk(model), Walk(model)
    walk.feed(tokens[:cut])
    clean.feed(tokens[:cut])
    walk.feed(others[:23])
    walk.pages.truncate(walk.sequence, cut)
    for token in tokens[cut:]:
        found, expected = walk.feed([token])[0], clean.feed([token])[0]
        assert torch.isfinite(found).all()
        assert torch.equal(found, expected)


@pytest.mark.parametrize("compiled", [True, False])
def test_a_future_token_changes_no_earlier_logit(small: Path, compiled: bool) -> None:
    model = load(small, compiled=compiled)
    (tokens,) = prompts_of([40], 96)
    expected = Walk(model).feed(tokens)[0]
    for place in (1, 17, 32, 39):
        changed = [*tokens[:place], (tokens[place] + 1) % 96, *tokens[place + 1 :]]
        found = Walk(model).feed(changed)[0]
        # In the fast mode another token may send other rows through an expert's product, whose
        # last bits depend on how many rows it has.
        tolerance = 0.0 if compiled else 1e-5
        assert float((found[:place] - expected[:place]).abs().max()) <= tolerance
        assert not torch.equal(found[place], expected[place])
