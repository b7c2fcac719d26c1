"""Verification attention in float32 on a CPU, in the parts of `paged_attention`.

A row's bits depend on neither its batch nor the number of threads.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mtp_kernels.cpu.jit import compiled
from mtp_kernels.cpu.paged_attention import attend_wave, merge_parts, plan, query_places
from mtp_kernels.cpu.team import share, wait
from mtp_kernels.cpu.vectors import borrowed


@compiled
def arrange(cu_q: Any, kv_lens: Any, q_latent: Any, q_rope: Any) -> Any:
    """Return tiles, waves and the largest number of parts of a wave, as plan does, and queries
    [T, h, c] and [T, h, r] in the order of tiles: [T*h, c+r]."""
    queries, heads, latent = q_latent.shape
    tiles, waves, most = plan(cu_q, kv_lens, heads)
    places = query_places(tiles, heads, queries)
    out = np.empty((queries * heads, latent + q_rope.shape[2]), np.float32)
    for query in range(queries):
        for head in range(heads):
            row = out[places[query, 0] + head * places[query, 1]]
            row[:latent] = q_latent[query, head]
            row[latent:] = q_rope[query, head]
    return tiles, waves, most, out


@compiled
def attend(
    member: Any, tiles: Any, waves: Any, queries: Any, keys: Any, parts: Any, out: Any, lse: Any
) -> None:
    """Write every row of a batch: out [T, h, c] and lse [T, h]."""
    tiles, queries, keys, parts, out = borrowed((tiles, queries, keys, parts, out))
    heads = out.shape[1]
    for wave in range(waves.size - 1):
        own = tiles[waves[wave] : waves[wave + 1]]
        attend_wave(member, own, queries, keys, parts)
        wait(member)
        first, last = share(member, own.size * heads)
        for unit in range(first, last):
            tile, head = own[unit // heads], unit % heads
            for query in range(tile.queries):
                row = tile.first_query + query
                lse[row, head] = merge_parts(tile, query, head, heads, parts, out[row, head])
        wait(member)
