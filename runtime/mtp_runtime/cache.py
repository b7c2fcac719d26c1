"""Paged cache: pages of sequences, apart from the tensors that a model's layers keep in them.

A sequence holds a list of pages and a length. All layers of all models that follow a sequence use
its pages: a slot, page * page_size + offset, is one token's place in every tensor. Tokens past the
length mean nothing and are overwritten. A page belongs to one sequence at a time, unless a prefix
cache shares it (mtp_runtime.prefix_cache).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol

import torch

from mtp_checkpoints.errors import ResourceError
from mtp_kernels.batch_layout import BatchLayout, StateLayout
from mtp_kernels.gated_delta import DeltaState
from mtp_kernels.verify_attention import has_split_cache

# Tensors of one layer: [pages, page, ...], whatever it keeps of a token, a latent, a key and a
# value, a state after it; or the DeltaState of a layer that keeps one state per sequence.
LayerCache = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class CacheSpec:
    """Size and kind of the tensors of a cache.

    states: sequences whose states a layer keeps at a time, each with room for so many drafts.
    """

    pages: int
    page_size: int
    dtype: torch.dtype
    device: torch.device
    states: int = 0
    drafts: int = 0

    def empty(self, *width: int) -> torch.Tensor:
        """Uninitialized entries [pages, page, *width]."""
        return torch.empty(self.pages, self.page_size, *width, dtype=self.dtype, device=self.device)


def elements_per_token(new_cache: Callable[[CacheSpec], LayerCache]) -> int:
    """Number of elements that a layer caches of a token, given its new_cache."""
    token = CacheSpec(pages=1, page_size=1, dtype=torch.float32, device=torch.device("cpu"))
    return sum(tensor.numel() for tensor in new_cache(token))  # without a state of any sequence


class Cache(Protocol):
    """Cached entries of some layers; how they lie in memory is for those layers to know."""

    @property
    def tensors(self) -> Iterable[torch.Tensor]:
        """Every tensor of every layer with pages, as views [pages, page, ...]."""

    @property
    def blocks(self) -> Iterable[torch.Tensor]:
        """The same as they lie in memory, [layers, pages, page, ...]."""

    @property
    def states(self) -> Iterable[torch.Tensor]:
        """Every tensor [states, ...] of every layer with a state per sequence."""


@dataclass(frozen=True)
class LayerCaches:
    """Caches of layers that each have tensors of their own."""

    layers: tuple[LayerCache, ...]

    @property
    def tensors(self) -> Iterable[torch.Tensor]:
        paged = (layer for layer in self.layers if not isinstance(layer, DeltaState))
        return (tensor for layer in paged for tensor in layer)

    @property
    def blocks(self) -> Iterable[torch.Tensor]:
        return (tensor[None] for tensor in self.tensors)

    @property
    def states(self) -> Iterable[torch.Tensor]:
        kept = (layer for layer in self.layers if isinstance(layer, DeltaState))
        return (tensor for layer in kept for tensor in layer)


@dataclass(frozen=True)
class JoinedCaches:
    """Caches of several runs of layers."""

    parts: tuple[Cache, ...]

    @property
    def tensors(self) -> Iterable[torch.Tensor]:
        return (tensor for part in self.parts for tensor in part.tensors)

    @property
    def blocks(self) -> Iterable[torch.Tensor]:
        return (block for part in self.parts for block in part.blocks)

    @property
    def states(self) -> Iterable[torch.Tensor]:
        return (tensor for part in self.parts for tensor in part.states)


@dataclass
class CachedSequence:
    """Pages of one sequence, in order, and the number of its cached tokens.

    adopted: how many of those tokens a prefix cache had. keys: those of its first pages in it.
    state: the place of its states in layers that keep some, which stand after its first
    state_length tokens; drafts that were accepted since are replayed.
    """

    pages: list[int] = field(default_factory=list)
    length: int = 0
    adopted: int = 0
    keys: list[bytes] = field(default_factory=list)
    state: int | None = None
    state_length: int = 0


class PageAllocator:
    """Allocates pages to sequences, whatever the layers keep in them.

    with_spare: caches have one page more, which no sequence gets, for rows that stand for nothing.
    states: sequences with pages at a time, where layers keep a state of each; state_pages: pages
    whose memory a state takes, which are not given to sequences meanwhile, so that pages bound the
    memory of both; drafts: the most that a pass takes of a sequence.
    """

    keeps_prefixes = False

    def __init__(
        self,
        pages: int,
        page_size: int,
        *,
        with_spare: bool = False,
        states: int = 0,
        state_pages: int = 0,
        drafts: int = 0,
    ) -> None:
        self.pages = pages
        self.page_size = page_size
        self._spare_pages = int(with_spare)
        self._states, self._drafts = states, drafts
        self.state_pages = state_pages
        self._free = list(range(pages - 1, -1, -1))
        self._free_states = list(range(states - 1, -1, -1))
        self._poisoned: list[Cache] = []
        # Pages, each from an offset on, that are filled with NaN before the next pass.
        self._freed: list[tuple[int, int]] = []

    @property
    def free_pages(self) -> int:
        """Number of pages that nobody holds, and whose memory no state has."""
        return len(self._free) - self._held_by_states

    @property
    def _held_by_states(self) -> int:
        """Number of pages whose memory states have."""
        return self.state_pages * (self._states - len(self._free_states))

    def chunk(self, start: int, rows: int, tokens: int) -> int:
        """Return how many of the rows from `start` of a sequence of tokens to take in a pass: all,
        unless it is to end where something is kept of it."""
        return rows

    def spec(self, dtype: torch.dtype, device: torch.device) -> CacheSpec:
        """Spec of a cache with room for all pages."""
        pages = self.pages + self._spare_pages
        return CacheSpec(pages, self.page_size, dtype, device, self._states, self._drafts)

    @property
    def spare_slot(self) -> int:
        """A slot of the spare page."""
        assert self._spare_pages, "made with_spare"
        return self.pages * self.page_size

    def keep_states_of(self, cache: Cache) -> None:
        """Keep states in a cache with the prefixes that are kept: there are none."""

    def poison_freed(self, cache: Cache) -> None:
        """Fill a cache with NaN, and from now on, before a pass, every slot of it that was freed: a
        test's way to see that nothing reads such slots."""
        for tensor in (*cache.blocks, *cache.states):
            tensor.fill_(torch.nan)
        self._poisoned.append(cache)

    def pages_for(self, tokens: int) -> int:
        """Number of pages that a number of tokens take; the last may be partly filled."""
        return -(-tokens // self.page_size)

    def missing_pages(self, sequence: CachedSequence, length: int) -> int:
        """Number of pages to take before the sequence can hold a number of tokens, with those of
        its state."""
        of_state = self.state_pages if sequence.state is None else 0
        return max(0, self.pages_for(length) - len(sequence.pages)) + of_state

    def reserve(self, sequence: CachedSequence, length: int) -> None:
        """Take the pages that a number of tokens need, and a state where layers keep one
        (ResourceError when there are too few)."""
        missing = self.missing_pages(sequence, length)
        if missing > self.free_pages:
            raise ResourceError(
                "The cache has no page left",
                expected=f"{missing} free pages",
                found=self.free_pages,
                todo="Give the engine more cache_tokens",
            )
        more = max(0, self.pages_for(length) - len(sequence.pages))
        sequence.pages += [self._take() for _ in range(more)]
        if self._states and sequence.state is None:
            sequence.state = self._free_states.pop()

    def append(self, sequence: CachedSequence, count: int) -> None:
        """Make the sequence longer; the caller writes the entries of the new tokens."""
        self.reserve(sequence, sequence.length + count)
        sequence.length += count

    def slots(self, sequence: CachedSequence, start: int, end: int) -> list[int]:
        """Slots of tokens [start, end) of a sequence."""
        size, pages = self.page_size, sequence.pages
        return [pages[t // size] * size + t % size for t in range(start, end)]

    def truncate(self, sequence: CachedSequence, length: int) -> None:
        """Forget the tokens from length on, and free the pages that hold none of the others."""
        keep = self.pages_for(length)
        if length % self.page_size:
            self._poison(sequence.pages[keep - 1], length % self.page_size)
        for page in reversed(sequence.pages[keep:]):
            self._give_back(page)
        del sequence.pages[keep:]
        del sequence.keys[length // self.page_size :]
        sequence.length = length
        sequence.adopted = min(sequence.adopted, length)
        if sequence.state is not None:
            assert not length or length >= sequence.state_length, "a state cannot go back"
            if not length:
                self._give_back_state(sequence)

    def advance(
        self,
        sequences: Sequence[CachedSequence],
        spans: Sequence[tuple[int, int]],
        certain: Sequence[int],
    ) -> StateLayout | None:
        """Take the states of sequences, which each go through rows [start, end) in one pass, to the
        end of their certain rows, the first of them: the others are drafts. None: without states.

        Drafts of the pass before that were accepted are replayed. A sequence begins at row 0.
        """
        if not self._states:
            return None
        replayed = []
        for sequence, (start, _), count in zip(sequences, spans, certain, strict=True):
            replayed.append(start - sequence.state_length if start else 0)
            sequence.state_length = start + count
        sizes = (end - start for start, end in spans)
        return StateLayout(
            cu_rows=_int32(accumulate(sizes, initial=0)),
            slots=_int32(sequence.state for sequence in sequences),
            replayed=_int32(replayed),
            certain=_int32(certain),
        )

    def _give_back_state(self, sequence: CachedSequence) -> None:
        """Take a sequence's state from it."""
        assert sequence.state is not None, "a sequence that had rows"
        for cache in self._poisoned:
            for tensor in cache.states:
                tensor[sequence.state] = torch.nan
        self._free_states.append(sequence.state)
        sequence.state, sequence.state_length = None, 0

    def adopt(self, sequence: CachedSequence, tokens: Sequence[int]) -> None:
        """Give an empty sequence the entries of its first tokens that a prefix cache has: none."""

    def remember(self, sequence: CachedSequence, tokens: Sequence[int]) -> None:
        """Let later sequences adopt the pages of these tokens that are full."""

    def _take(self) -> int:
        """Take a page that nobody holds."""
        return self._free.pop()

    def _give_back(self, page: int) -> None:
        """Free a page of a sequence."""
        self._poison(page, 0)
        self._free.append(page)

    def _poison(self, page: int, first: int) -> None:
        """Have slots of a page from an offset on filled with NaN before the next pass."""
        if self._poisoned:
            self._freed.append((page, first))

    def fill_freed(self) -> None:
        """Fill the slots that were freed, before a pass writes some of them."""
        freed, self._freed = self._freed, []
        for block in (block for cache in self._poisoned if freed for block in cache.blocks):
            for page, first in freed:
                block[:, page, first:] = torch.nan


def lay_out(
    pages: PageAllocator,
    sequences: Sequence[CachedSequence],
    spans: Sequence[tuple[int, int]],
    device: torch.device,
    states: StateLayout | None = None,
) -> BatchLayout:
    """Lay rows [start, end) of each sequence side by side for one forward pass.

    Their pages must be there; a row sees the tokens of its sequence up to itself. states: of layers
    that keep one of each sequence, as the pages advanced them.
    """
    pages.fill_freed()
    positions: list[int] = []
    slots: list[int] = []
    cu_q = [0]
    for sequence, (start, end) in zip(sequences, spans, strict=True):
        positions += range(start, end)
        slots += pages.slots(sequence, start, end)
        cu_q.append(cu_q[-1] + end - start)
    lengths_on = torch.device("cpu") if has_split_cache(device) else device
    return BatchLayout(
        positions=torch.tensor(positions, device=device),
        slots=torch.tensor(slots, device=device),
        page_table=page_table(sequences, device),
        kv_lens=torch.tensor([end for _, end in spans], dtype=torch.int32, device=lengths_on),
        cu_q=torch.tensor(cu_q, dtype=torch.int32, device=lengths_on),
        max_q_len=max((end - start for start, end in spans), default=0),
        states=states,
    )


def lay_out_whole(
    pages: PageAllocator,
    sequences: Sequence[CachedSequence],
    spans: Sequence[tuple[int, int]],
    device: torch.device,
) -> BatchLayout:
    """Lay out rows as lay_out does, none of which is a draft: states advance through all."""
    certain = [end - start for start, end in spans]
    return lay_out(pages, sequences, spans, device, pages.advance(sequences, spans, certain))


def _int32(numbers: Iterable[int | None]) -> torch.Tensor:
    return torch.tensor(list(numbers), dtype=torch.int32)


def page_table(sequences: Sequence[CachedSequence], device: torch.device) -> torch.Tensor:
    """Pages of each sequence [b, max_pages], int32; entries past its last page are 0."""
    columns = max(len(sequence.pages) for sequence in sequences)
    rows = [sequence.pages + [0] * (columns - len(sequence.pages)) for sequence in sequences]
    return torch.tensor(rows, dtype=torch.int32, device=device)
