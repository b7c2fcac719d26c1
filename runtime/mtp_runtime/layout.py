"""Lays rows of several requests side by side for one forward pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mtp_runtime.cache import CachedSequence, PagedCache
from mtp_runtime.layers.attention import BatchLayout


def lay_out(
    cache: PagedCache,
    sequences: Sequence[CachedSequence],
    spans: Sequence[tuple[int, int]],
    device: torch.device,
) -> BatchLayout:
    """Rows [start, end) of each sequence, whose pages are there; it sees its tokens [0, end)."""
    positions: list[int] = []
    slots: list[int] = []
    cu_q = [0]
    for sequence, (start, end) in zip(sequences, spans, strict=True):
        positions += range(start, end)
        slots += cache.slots(sequence, start, end)
        cu_q.append(cu_q[-1] + end - start)
    columns = max(cache.pages_for(end) for _, end in spans)
    table = [(s.pages + [0] * columns)[:columns] for s in sequences]
    return BatchLayout(
        torch.tensor(positions, device=device),
        torch.tensor(slots, device=device),
        torch.tensor(table, dtype=torch.int32, device=device),
        torch.tensor([end for _, end in spans], dtype=torch.int32, device=device),
        torch.tensor(cu_q, dtype=torch.int32, device=device),
    )
