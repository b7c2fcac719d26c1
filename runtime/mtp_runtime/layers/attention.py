"""Attention over the paged cache."""

from __future__ import annotations

import torch

from mtp_kernels.batch_layout import BatchLayout
from mtp_kernels.verify_attention import verify_attention


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
