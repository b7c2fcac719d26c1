"""FlashMLA's two functions, with what its documentation wants of their arguments."""

from __future__ import annotations

import torch


def get_mla_metadata(
    cache_seqlens: torch.Tensor, num_heads_per_head_k: int, num_heads_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    assert cache_seqlens.dtype == torch.int32 and num_heads_k == 1 and num_heads_per_head_k > 0
    return torch.zeros(4, 8, dtype=torch.int32), torch.zeros(len(cache_seqlens) + 1)


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    head_dim_v: int,
    tile_scheduler_metadata: torch.Tensor,
    num_splits: torch.Tensor,
    softmax_scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    b, s, h, width = q.shape
    assert causal and softmax_scale > 0 and block_table.shape[0] == b == len(cache_seqlens)
    assert k_cache.shape[1:] == (64, 1, width) and num_splits.shape == (b + 1,)
    return q.new_zeros(b, s, h, head_dim_v), q.new_zeros(b, h, s)
