"""Attention over the paged cache, and the layout of a batch that it goes by."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mtp_kernels.verify_attention import verify_attention


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


def attend(
    q_latent: torch.Tensor,  # [T, h, c]
    q_rope: torch.Tensor,  # [T, h, r]
    kv_cache: torch.Tensor,  # [pages, page, c+r]
    layout: BatchLayout,
    scale: float,
    backend: str,
) -> torch.Tensor:
    """Every row attends to its request's tokens up to itself: [T, h, c]."""
    return verify_attention(
        q_latent,
        q_rope.contiguous(),
        kv_cache,
        layout.page_table,
        layout.kv_lens,
        layout.cu_q,
        scale,
        backend=backend,
    )[0]
