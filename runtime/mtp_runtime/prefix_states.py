"""Prefix cache of models whose layers keep a state per sequence: shared pages, with checkpoints of
the states at ends of pages.

A sequence adopts known pages up to the last one at whose end a checkpoint was taken. They are taken
where later sequences are likely to part: at the last full page of a prompt or an output, and every
2,048 tokens. Pages bound the memory of all: of what nobody holds what was not used for the longest
goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property

import torch

from mtp_runtime.cache import Cache, CachedSequence
from mtp_runtime.prefix_cache import SharedPages

CHECKPOINT_TOKENS = 2048
_SHARE = 4  # of all pages, checkpoints have the memory of one such part at most

Checkpoint = tuple[torch.Tensor, ...]


class SharedStates(SharedPages):
    """Allocates pages and states, and keeps both of prefixes that may come again."""

    @cached_property
    def _checkpoints(self) -> OrderedDict[bytes, Checkpoint]:
        """Checkpoints by the key of the page at whose end they were taken, the next to go first."""
        return OrderedDict()

    @cached_property
    def _caches(self) -> list[Cache]:
        return []

    @property
    def _most(self) -> int:
        """Number of checkpoints that are kept at most."""
        return max(1, self.pages // (_SHARE * self.state_pages))

    @property
    def checkpoints(self) -> int:
        """Number of checkpoints that are kept."""
        return len(self._checkpoints)

    def keep_states_of(self, cache: Cache) -> None:
        """Take checkpoints of the states in a cache."""
        self._caches.append(cache)

    def chunk(self, start: int, rows: int, tokens: int) -> int:
        """Return how many of a prompt's next rows to take, so that a pass ends with the last full
        page of its tokens."""
        end = (tokens - 1) // self.page_size * self.page_size
        return end - start if start < end < start + rows else rows

    def adopt(self, sequence: CachedSequence, tokens: Sequence[int]) -> None:
        """Give an empty sequence the pages that are known of its tokens, up to a checkpoint."""
        super().adopt(sequence, tokens)
        kept = [n for n, key in enumerate(sequence.keys, 1) if key in self._checkpoints]
        self.truncate(sequence, kept[-1] * self.page_size if kept else 0)
        if kept:
            self._checkpoints.move_to_end(sequence.keys[-1])

    def reserve(self, sequence: CachedSequence, length: int) -> None:
        """Take the pages that a number of tokens need, and a state, which stands after the tokens
        that were adopted (ResourceError when there are too few)."""
        adopted = sequence.state is None and sequence.length > 0
        checkpoint = self._checkpoints[sequence.keys[-1]] if adopted else ()
        super().reserve(sequence, length)
        for tensor, kept in zip(self._tensors(), checkpoint, strict=False):
            tensor[sequence.state] = kept
        if adopted:
            sequence.state_length = sequence.length
        self._trim()

    def remember(self, sequence: CachedSequence, tokens: Sequence[int]) -> None:
        """Note the full pages of a sequence, and a checkpoint where its state is at one's end."""
        super().remember(sequence, tokens)
        at, size = sequence.state_length, self.page_size
        is_last = at + size >= len(tokens)
        if not at or at % size or not (is_last or at % CHECKPOINT_TOKENS == 0):
            return
        key = sequence.keys[at // size - 1]
        if key not in self._checkpoints:
            states = (tensor[sequence.state].clone() for tensor in self._tensors())
            self._checkpoints[key] = tuple(states)
        self._checkpoints.move_to_end(key)
        if len(self._checkpoints) > self._most:
            self._checkpoints.popitem(last=False)
        self._trim()

    def _tensors(self) -> list[torch.Tensor]:
        return [tensor for cache in self._caches for tensor in cache.states]

    def _trim(self) -> None:
        """Free pages, then checkpoints, until those that nobody has bound the memory of states."""
        while self.state_pages * len(self._checkpoints) > self.free_pages - len(self._kept):
            if self._kept:
                self._forget_page()
            else:
                self._checkpoints.popitem(last=False)
