"""Kernels as layers call them. An exported graph holds each as one operator, which reads lengths
when it runs, and never while it is traced.

Sizes of exported tensors are numbers by `shape` alone: len would tie a graph to one size.
"""

from __future__ import annotations

import torch

from mtp_kernels.batch_layout import BatchLayout
from mtp_kernels.stored_linear import StoredWeight, grouped_linear
from mtp_kernels.verify_attention import verify_attention


def attend(
    query: tuple[torch.Tensor, torch.Tensor],  # latents [T, h, c] and rope [T, h, r]
    cache: tuple[torch.Tensor, ...],
    layout: BatchLayout,
    *,
    scale: float,
    backend: str,
) -> torch.Tensor:
    """Return what verify_attention returns, [T, h, c], for a cache of one tensor or two."""
    kv_cache, *rope_cache = cache
    lengths = layout.page_table, layout.kv_lens, layout.cu_q
    if torch.compiler.is_exporting():
        made: torch.Tensor = _attend(*query, kv_cache, *lengths, scale, backend)
        return made
    return verify_attention(
        *query,
        kv_cache,
        *lengths,
        scale,
        rope_cache=rope_cache[0] if rope_cache else None,
        max_q_len=layout.max_q_len,
        backend=backend,
    )[0]


def grouped_product(
    x: torch.Tensor, rows: torch.Tensor | None, ends: torch.Tensor, weight: StoredWeight
) -> torch.Tensor:
    """Return what grouped_linear returns."""
    if not torch.compiler.is_exporting():
        return grouped_linear(x, rows, ends, weight)
    assert isinstance(weight, torch.Tensor), "exported models have dense weights"
    made: torch.Tensor = _grouped_product(x if rows is None else x[rows], ends, weight)
    return made


@torch.library.custom_op("mtp_export::verify_attention", mutates_args=())
def _attend(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    kv_cache: torch.Tensor,
    page_table: torch.Tensor,
    kv_lens: torch.Tensor,
    cu_q: torch.Tensor,
    scale: float,
    backend: str,
) -> torch.Tensor:
    lengths = page_table, kv_lens, cu_q
    return verify_attention(q_latent, q_rope, kv_cache, *lengths, scale, backend=backend)[0]


@_attend.register_fake
def _(q_latent: torch.Tensor, *others: object) -> torch.Tensor:
    return torch.empty_like(q_latent)


@torch.library.custom_op("mtp_export::grouped_linear", mutates_args=())
def _grouped_product(pairs: torch.Tensor, ends: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return grouped_linear(pairs, None, ends, weight)


@_grouped_product.register_fake
def _(pairs: torch.Tensor, ends: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return pairs.new_empty(pairs.shape[0], weight.shape[1])
