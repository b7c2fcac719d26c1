"""Lays rows of several requests side by side for one forward pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mtp_kernels.batch_layout import BatchLayout
from mtp_runtime.cache import CachedSequence, PagedCache


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
    return BatchLayout(
        positions=torch.tensor(positions, device=device),
        slots=torch.tensor(slots, device=device),
        page_table=page_table(sequences, device),
        kv_lens=torch.tensor([end for _, end in spans], dtype=torch.int32, device=device),
        cu_q=torch.tensor(cu_q, dtype=torch.int32, device=device),
    )


def page_table(sequences: Sequence[CachedSequence], device: torch.device) -> torch.Tensor:
    """The pages of each sequence [b, max_pages], int32; what is past its last page is 0."""
    columns = max(len(sequence.pages) for sequence in sequences)
    rows = [sequence.pages + [0] * (columns - len(sequence.pages)) for sequence in sequences]
    return torch.tensor(rows, dtype=torch.int32, device=device)
