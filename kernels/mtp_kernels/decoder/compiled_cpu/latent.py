"""Steps of multi-head latent attention in its absorbed form."""

from __future__ import annotations

from typing import Any

import numpy as np

from mtp_kernels.cpu.code import FLOAT_BYTES
from mtp_kernels.cpu.jit import inner
from mtp_kernels.cpu.paged_attention import TILE_ROWS, merge_parts
from mtp_kernels.cpu.panel_forms import PANEL
from mtp_kernels.cpu.team import share
from mtp_kernels.cpu.vectors import Rows, address, dot_row, first_rows, rows_of
from mtp_kernels.decoder.compiled_cpu.rows import (
    BLOCK_ROWS,
    copy,
    norm_block,
    norm_row,
    panel_of,
    panels_of,
    project,
    rotate,
    vector,
)


@inner
def fill_latents(
    member: Any, layer: Any, sizes: Any, batch: Any, cache: Any, projected: Any
) -> None:
    """Write latents and rotated rope keys of the member's rows to their slots."""
    latent, rope = sizes.attention.latent, sizes.attention.rope
    norm = vector(layer.latent_norm, latent)
    start = query_columns(sizes)
    first, last = share(member, batch.slots.size)
    for row in range(first, last):
        source = projected[row]
        slot = cache[batch.slots[row]]
        norm_row(source[start : start + latent], norm, sizes.norm_eps, slot[:latent])
        key = source[start + latent : start + latent + rope]
        rotate(key, batch.cos_sin[row], slot[latent:])


@inner
def query_columns(sizes: Any) -> Any:
    """Return the width of the query's part of the down projection."""
    own = sizes.attention
    return own.query_rank or sizes.heads * (own.nope + own.rope)


@inner
def make_latent_queries(member: Any, layer: Any, sizes: Any, batch: Any, scratch: Any) -> None:
    """Make queries in the space of latents, shared out by head and block of rows."""
    own, count = sizes.attention, scratch.projected.shape[0]
    blocks = -(-count // BLOCK_ROWS)
    normed = np.empty((BLOCK_ROWS, max(1, own.query_rank)), np.float32)
    query = np.empty((BLOCK_ROWS, panels_of(own.nope + own.rope) * PANEL), np.float32)
    latents = np.empty((BLOCK_ROWS, panels_of(own.latent) * PANEL), np.float32)
    scaled = np.empty((BLOCK_ROWS, own.nope), np.float32)
    first, last = share(member, sizes.heads * blocks)
    for unit in range(first, last):
        head, row = unit // blocks, unit % blocks * BLOCK_ROWS
        rows = min(BLOCK_ROWS, count - row)
        read_query(layer, sizes, scratch.projected[row : row + rows], head, normed, query)
        project_query(layer, own, head, first_rows(rows_of(query), rows), scaled, latents)
        for r in range(rows):
            base, stride = batch.places[row + r]
            out = scratch.queries[base + head * stride]
            copy(latents[r], out[: own.latent])
            q_rope = query[r, own.nope : own.nope + own.rope]
            rotate(q_rope, batch.cos_sin[row + r], out[own.latent :])


@inner
def project_query(layer: Any, own: Any, head: Any, query: Any, scaled: Any, latents: Any) -> None:
    """Write one head's latents [rows, c] for Rows of queries without a position.

    Of a weight of codes with scales of its inputs, queries are multiplied by those first, once for
    each group of outputs, to which their product with minimums is added.
    """
    panels, width = panels_of(own.latent), latents.shape[1]
    weight = panel_of(layer.key_up, layer.key_up_form, head * panels, own.nope)
    if layer.key_group == 0:
        project(query, weight, (0, panels), address(latents), width)
        return
    groups, made = -(-own.latent // layer.key_group), np.empty_like(latents)
    least, numbers = np.zeros(1, np.float32), 1 + layer.key_minimums
    for group in range(groups):
        start = group * layer.key_group
        stop = min(start + layer.key_group, own.latent)
        at = layer.key_scale + FLOAT_BYTES * (head * groups + group) * numbers * own.nope
        scale = vector(at + FLOAT_BYTES * layer.key_minimums * own.nope, own.nope)
        for r in range(query.count):
            given = vector(query.at + FLOAT_BYTES * r * query.stride, own.nope)
            for k in range(own.nope):
                scaled[r, k] = given[k] * scale[k]
        span = start // PANEL, panels_of(stop)
        project(first_rows(rows_of(scaled), query.count), weight, span, address(made), width)
        for r in range(query.count):
            line = latents[r, start:stop]
            copy(made[r, start:stop], line)
            if layer.key_minimums:
                start_of_row = query.at + FLOAT_BYTES * r * query.stride
                dot_row(start_of_row, at, own.nope, address(least))
                for c in range(line.size):
                    line[c] += least[0]


@inner
def read_query(layer: Any, sizes: Any, projected: Any, head: Any, normed: Any, query: Any) -> None:
    """Write one head's queries [rows, n+r], out of their low rank where there is one."""
    own = sizes.attention
    rank, size = own.query_rank, own.nope + own.rope
    if rank == 0:
        for r in range(projected.shape[0]):
            copy(projected[r, head * size :], query[r, :size])
        return
    norm = vector(layer.query_norm, rank)
    block = norm_block(projected, 0, norm, sizes.norm_eps, normed)
    width = query.shape[1]
    weight = panel_of(layer.query_up, layer.query_up_form, head * (width // PANEL), rank)
    project(block, weight, (0, width // PANEL), address(query), width)


@inner
def project_values(member: Any, layer: Any, sizes: Any, tiles: Any, scratch: Any) -> None:
    """Merge the parts of a wave's tiles and project each head's latents to its values."""
    heads, latent, value = sizes.heads, sizes.attention.latent, sizes.attention.value
    attended = np.empty((TILE_ROWS, latent), np.float32)
    width = panels_of(value) * PANEL
    values = np.empty((TILE_ROWS, width), np.float32)
    first, last = share(member, tiles.size * heads)
    for unit in range(first, last):
        tile, head = tiles[unit // heads], unit % heads
        for query in range(tile.queries):
            merge_parts(tile, query, head, heads, scratch.parts, attended[query])
        weight = panel_of(layer.value_up, layer.value_up_form, head * (width // PANEL), latent)
        block = Rows(address(attended), latent, tile.queries)
        project(block, weight, (0, width // PANEL), address(values), width)
        for query in range(tile.queries):
            out = scratch.values[tile.first_query + query]
            copy(values[query], out[head * value : (head + 1) * value])
