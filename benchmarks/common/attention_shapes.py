"""Batches to time verification attention on, and the calls that take them: ours, the same queries
as requests of their own, and torch's scaled_dot_product_attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from mtp_kernels.verify_attention import make_workspace, verify_attention

LATENT, ROPE, PAGE, POOLS = 512, 64, 64, 4
WIDTH = LATENT + ROPE
LARGEST_L2_BYTES = 128 << 20


@dataclass(frozen=True)
class Shape:
    """One batch: b requests of n queries and h heads over about `tokens` cached tokens each."""

    batch: int
    tokens: int
    queries: int
    heads: int
    ragged: bool = False  # lengths drawn from a normal distribution, N(tokens, tokens / 2)


def kv_lens_of(shape: Shape) -> torch.Tensor:
    lengths = torch.full((shape.batch,), float(shape.tokens))
    if shape.ragged:
        generator = torch.Generator().manual_seed(0)
        lengths = lengths + torch.randn(shape.batch, generator=generator) * shape.tokens / 2
    return lengths.clamp(min=shape.queries).to(torch.int32)


def cache_count(shape: Shape) -> int:
    """Return how many caches calls must go to in turns so that none finds its tokens in a GPU's
    second-level cache."""
    cache_bytes = int(kv_lens_of(shape).sum()) * WIDTH * 2
    return max(1, min(POOLS, -(-LARGEST_L2_BYTES * 2 // cache_bytes)))


def pools_of(
    shape: Shape,
    device: torch.device | str,
    dtype: torch.dtype = torch.bfloat16,
    count: int = POOLS,
) -> list[dict[str, Any]]:
    """Return the arguments of the fused call, once for each of `count` caches."""
    kv_lens = kv_lens_of(shape)
    width = -(-int(kv_lens.amax()) // PAGE)
    rows, pages = shape.batch * shape.queries, shape.batch * width
    options: dict[str, Any] = {"dtype": dtype, "device": device}
    return [
        {
            "q_latent": torch.randn(rows, shape.heads, LATENT, **options),
            "q_rope": torch.randn(rows, shape.heads, ROPE, **options),
            "kv_cache": torch.randn(pages, PAGE, WIDTH, **options),
            "page_table": torch.randperm(pages, dtype=torch.int32).view(-1, width).to(device),
            "kv_lens": kv_lens.to(device),
            "cu_q": (torch.arange(shape.batch + 1, dtype=torch.int32) * shape.queries).to(device),
            "scale": WIDTH**-0.5,
        }
        for _ in range(count)
    ]


def expanded(arguments: dict[str, Any], shape: Shape, adjacent: bool) -> dict[str, Any]:
    """Expand the batch: every query a request; a group's rows side by side, or b rows apart."""
    rows = torch.arange(shape.batch * shape.queries)
    if not adjacent:
        rows = rows.view(shape.batch, shape.queries).t().flatten()
    owner, position = rows // shape.queries, rows % shape.queries
    device = arguments["q_latent"].device
    kv_lens = arguments["kv_lens"].cpu()[owner] - (shape.queries - 1 - position).to(torch.int32)
    return arguments | {
        "q_latent": arguments["q_latent"][rows.to(device)],
        "q_rope": arguments["q_rope"][rows.to(device)],
        "page_table": arguments["page_table"][owner.to(device)],
        "kv_lens": kv_lens.to(torch.int32).to(device),
        "cu_q": torch.arange(len(rows) + 1, dtype=torch.int32).to(device),
    }


def calls_of(pools: list[dict[str, Any]], max_q_len: int, backend: str) -> list[Callable[[], Any]]:
    """Return one call per cache, sharing a workspace and outputs, as an engine's layers would."""
    first = pools[0]
    query, cache = first["q_latent"], first["kv_cache"]
    workspace = make_workspace(
        batch=len(first["kv_lens"]), queries=len(query), max_q_len=max_q_len,
        kv_tokens=first["page_table"].shape[1] * PAGE, heads=query.shape[1], page=PAGE,
        dtype=query.dtype, device=cache.device, backend=backend,
    )  # fmt: skip
    out = (torch.empty_like(query), query.new_empty(query.shape[:2], dtype=torch.float32))
    options = {"workspace": workspace, "out": out, "backend": backend}
    return [partial(verify_attention, **pool, **options) for pool in pools]


def sdpa_call(
    arguments: dict[str, Any], shape: Shape, gathered: torch.Tensor, folded: bool
) -> Callable[[], Any]:
    """Gather the requests' pages, then torch's attention; `folded` gives it our blocks of rows.

    The cached token serves as key and value, 576 wide: torch takes keys and values of one width
    on its fast path only, and the output's last 64 columns are cut off. Lengths must be equal.
    """
    b, n, h, tokens = shape.batch, shape.queries, shape.heads, shape.tokens
    pages = arguments["page_table"].flatten()
    query = torch.cat([arguments["q_latent"], arguments["q_rope"]], -1)  # [b * s, h, c+r]
    query = query.view(b, n, h, WIDTH)
    query = query.view(b, 1, n * h, WIDTH) if folded else query.transpose(1, 2).contiguous()
    limits = tokens - n + 1 + torch.arange(n, device=query.device)
    mask = torch.zeros(n, tokens, dtype=query.dtype, device=query.device)
    hidden = torch.arange(tokens, device=query.device) >= limits[:, None]
    mask.masked_fill_(hidden, -torch.inf)
    mask = mask.repeat_interleave(h, 0)[None, None] if folded else mask[None, None]

    def call() -> torch.Tensor:
        torch.index_select(arguments["kv_cache"], 0, pages, out=gathered)
        key = gathered.view(b, 1, -1, WIDTH)[:, :, :tokens]
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, key, attn_mask=None if n == 1 else mask, scale=arguments["scale"],
            enable_gqa=not folded,
        )[..., :LATENT]  # fmt: skip

    return call
