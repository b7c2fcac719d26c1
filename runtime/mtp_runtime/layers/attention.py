"""Attention over the paged cache: fused for speed, or canonical for bits that do not depend on the
batch. Both take the same batch layout, so that a model holds one of them and does not know which.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch

from mtp_kernels.verify_attention import verify_attention

TILE_ROWS = 32
BLOCK_TOKENS = 128
# A group with more scores than this goes through the general kernel, which bounds its memory.
MAX_LEAN_SCORES = 1 << 21


@dataclass(frozen=True)
class BatchLayout:
    """Which rows of a forward pass belong to which request, and where its cache lies.

    positions [T] and slots [T] of each row (a slot is page * page_size + offset); page_table
    [b, max_pages], kv_lens [b] and cu_q [b+1] as verify_attention takes them, int32.
    """

    positions: torch.Tensor
    slots: torch.Tensor
    page_table: torch.Tensor
    kv_lens: torch.Tensor
    cu_q: torch.Tensor
    page_size: int

    @cached_property
    def tiles(self) -> tuple[Tile, ...]:
        """The work of canonical attention, planned once for all layers."""
        return tuple(self._plan_tiles())

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """Each request's rows and pages as numbers, read once for all layers."""
        starts, kv_lens = self.cu_q.tolist(), self.kv_lens.tolist()
        table = self.page_table.tolist()
        spans = []
        for request, kv_len in enumerate(kv_lens):
            start, end = starts[request], starts[request + 1]
            pages = table[request][: -(-kv_len // self.page_size)]
            in_a_row = pages == list(range(pages[0], pages[0] + len(pages)))
            first = pages[0] * self.page_size if in_a_row else None
            rows = end - start
            unseen = None
            if rows > 1:
                unseen = torch.ones(rows, rows, dtype=torch.bool, device=self.slots.device)
                unseen = unseen.triu_(1)[:, None]
            ids = self.page_table[request, : len(pages)]
            spans.append(Span(start, end, kv_len, first, ids, unseen))
        return tuple(spans)

    def _plan_tiles(self) -> Iterator[Tile]:
        starts, kv_lens = self.cu_q.tolist(), self.kv_lens.tolist()
        device = self.slots.device
        for request, kv_len in enumerate(kv_lens):
            start, end = starts[request], starts[request + 1]
            blocks = -(-kv_len // BLOCK_TOKENS)
            tokens = torch.arange(blocks * BLOCK_TOKENS, device=device)
            # Past the end the last token stands in: finite, and always masked.
            seen = tokens.clamp(max=kv_len - 1)
            pages = self.page_table[request].long()[seen // self.page_size]
            slots = (pages * self.page_size + seen % self.page_size).view(blocks, -1)
            limits = torch.arange(kv_len - (end - start) + 1, kv_len + 1, device=device)
            yield Tile(start, end, limits, slots, tokens.view(blocks, -1))


@dataclass(frozen=True)
class Span:
    """One request's rows [start, end) and its pages; first_slot where they lie in a row.

    unseen [s, 1, s]: of the last s tokens, those after each row; None for a single row.
    """

    start: int
    end: int
    kv_len: int
    first_slot: int | None
    pages: torch.Tensor
    unseen: torch.Tensor | None


@dataclass(frozen=True)
class Tile:
    """One request's rows [start, end): what each sees [s], and its cache in blocks [n, t]."""

    start: int
    end: int
    limits: torch.Tensor
    slots: torch.Tensor
    tokens: torch.Tensor


class Attention(Protocol):
    """Attention as a model calls it; out [T, h, c]."""

    def __call__(
        self,
        q_latent: torch.Tensor,  # [T, h, c]
        q_rope: torch.Tensor,  # [T, h, r]
        kv_cache: torch.Tensor,  # [pages, page, c+r]
        layout: BatchLayout,
        scale: float,
    ) -> torch.Tensor: ...


def fused_attention(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    kv_cache: torch.Tensor,
    layout: BatchLayout,
    scale: float,
) -> torch.Tensor:
    """The fused kernel, or on a CPU, for small groups, its arithmetic in the fewest operations.

    A small group costs more in checks and launches than in arithmetic there.
    """
    heads = q_latent.shape[1]
    if q_latent.device.type == "cpu" and q_latent.dtype == torch.float32:
        scores = max((span.end - span.start) * span.kv_len for span in layout.spans) * heads
        if scores <= MAX_LEAN_SCORES:
            return _lean_attention(q_latent, q_rope, kv_cache, layout, scale)
    return verify_attention(
        q_latent,
        q_rope.contiguous(),
        kv_cache,
        layout.page_table,
        layout.kv_lens,
        layout.cu_q,
        scale,
    )[0]


def _lean_attention(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    kv_cache: torch.Tensor,
    layout: BatchLayout,
    scale: float,
) -> torch.Tensor:
    """Two products and a softmax a request; pages that lie in a row are not even gathered."""
    count, heads, latent = q_latent.shape
    query = torch.cat([q_latent, q_rope], dim=-1).mul_(scale).flatten(0, 1)  # [T*h, c+r]
    out = torch.empty(count * heads, latent)
    cache = kv_cache.flatten(0, 1)
    for span in layout.spans:
        if span.first_slot is None:
            tokens = kv_cache[span.pages].flatten(0, 1)[: span.kv_len]  # [t, c+r]
        else:
            tokens = cache[span.first_slot : span.first_slot + span.kv_len]
        rows = slice(span.start * heads, span.end * heads)
        scores = torch.mm(query[rows], tokens.t())
        if span.unseen is not None:
            size = span.end - span.start
            last = scores.view(size, heads, -1)[:, :, span.kv_len - size :]
            last.masked_fill_(span.unseen, -torch.inf)
        torch.mm(scores.softmax(dim=1), tokens[:, :latent], out=out[rows])
    return out.view(count, heads, latent)


def canonical_attention(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    kv_cache: torch.Tensor,
    layout: BatchLayout,
    scale: float,
) -> torch.Tensor:
    """Attention whose every row is computed the same way, whatever else is in the batch.

    Tokens come in blocks that start at multiples of BLOCK_TOKENS, rows in tiles of TILE_ROWS:
    all products have one shape, and a block that a row does not see changes nothing in its sums.
    """
    query = torch.cat([q_latent, q_rope], dim=-1)
    tokens = kv_cache.flatten(0, 1)
    heads, latent = q_latent.shape[1:]
    out = torch.zeros_like(q_latent)
    for tile in layout.tiles:
        blocks = [tokens[slots] for slots in tile.slots]  # each [t, c+r]
        rows = query[tile.start : tile.end].flatten(0, 1)  # [s*h, c+r]
        limits = tile.limits.repeat_interleave(heads)
        result = [
            _attend(rows[at : at + TILE_ROWS], limits[at : at + TILE_ROWS], blocks, tile, scale)
            for at in range(0, len(rows), TILE_ROWS)
        ]
        out[tile.start : tile.end] = torch.cat(result).view(-1, heads, query.shape[-1])[
            ..., :latent
        ]
    return out


def _attend(
    rows: torch.Tensor,  # [up to TILE_ROWS, c+r]
    limits: torch.Tensor,
    blocks: list[torch.Tensor],
    tile: Tile,
    scale: float,
) -> torch.Tensor:
    """One tile of rows over all blocks; the rope columns of the result mean nothing."""
    count = len(rows)
    rows = torch.cat([rows, rows.new_zeros(TILE_ROWS - count, rows.shape[1])])
    limits = torch.cat([limits, limits.new_ones(TILE_ROWS - count)])[:, None]
    top = rows.new_full((TILE_ROWS, 1), -torch.inf)
    mass, total = torch.zeros_like(top), torch.zeros_like(rows)
    for tokens, block in zip(tile.tokens, blocks, strict=True):
        scores = torch.mm(rows, block.t()).mul_(scale)
        scores.masked_fill_(tokens >= limits, -torch.inf)
        new_top = torch.maximum(top, scores.amax(dim=1, keepdim=True))
        shrink = torch.exp(top - new_top)
        weights = torch.exp(scores - new_top)
        mass = mass * shrink + weights.sum(dim=1, keepdim=True)
        total = total * shrink + torch.mm(weights, block)
        top = new_top
    return (total / mass)[:count]
