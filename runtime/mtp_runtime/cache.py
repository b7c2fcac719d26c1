"""The paged cache of latents: one memory for all requests, handed out in pages.

A request holds a list of pages and a length; the tokens past the length mean nothing and are
overwritten. Pages belong to one request at a time, so nothing is counted or shared.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from mtp_export.errors import ResourceError


@dataclass
class CachedSequence:
    """One request's part of the cache: its pages, in order, and how many tokens are cached."""

    pages: list[int] = field(default_factory=list)
    length: int = 0


class PagedCache:
    """Latents and rope keys of all layers: `layers` [layers, pages, page, c+r]."""

    def __init__(
        self,
        layers: int,
        pages: int,
        page_size: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        poison_freed: bool = False,
    ) -> None:
        self.page_size = page_size
        self.pages = pages
        self.layers = torch.empty(layers, pages, page_size, width, dtype=dtype, device=device)
        self._free = list(range(pages - 1, -1, -1))
        self._poison_freed = poison_freed
        if poison_freed:
            self.layers.fill_(torch.nan)

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def pages_for(self, tokens: int) -> int:
        """Pages that so many tokens fill, the last one perhaps in part."""
        return -(-tokens // self.page_size)

    def missing_pages(self, sequence: CachedSequence, length: int) -> int:
        """Pages to take before the sequence can hold so many tokens."""
        return max(0, self.pages_for(length) - len(sequence.pages))

    def reserve(self, sequence: CachedSequence, length: int) -> None:
        """Take the pages that so many tokens need (ResourceError when there are too few)."""
        missing = self.missing_pages(sequence, length)
        if missing > len(self._free):
            raise ResourceError(
                "The cache has no page left",
                expected=f"{missing} free pages",
                found=len(self._free),
                todo="Give the engine more cache_tokens",
            )
        sequence.pages += [self._free.pop() for _ in range(missing)]

    def append(self, sequence: CachedSequence, count: int) -> None:
        """Make the sequence longer; what the new tokens hold is for the caller to write."""
        self.reserve(sequence, sequence.length + count)
        sequence.length += count

    def slots(self, sequence: CachedSequence, start: int, end: int) -> list[int]:
        """Where tokens [start, end) of a sequence lie: page * page_size + offset."""
        size, pages = self.page_size, sequence.pages
        return [pages[t // size] * size + t % size for t in range(start, end)]

    def truncate(self, sequence: CachedSequence, length: int) -> None:
        """Forget the tokens from length on; pages that hold none of the others become free."""
        if self._poison_freed:
            self._poison(sequence, length)
        keep = self.pages_for(length)
        self._free += reversed(sequence.pages[keep:])
        del sequence.pages[keep:]
        sequence.length = length

    def _poison(self, sequence: CachedSequence, length: int) -> None:
        slots = self.slots(sequence, length, len(sequence.pages) * self.page_size)
        index = torch.tensor(slots, dtype=torch.long, device=self.layers.device)
        self.layers.flatten(1, 2)[:, index] = torch.nan
