"""Attention half of a decoder layer: multi-head latent attention in its absorbed form."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from mtp_kernels.cpu.jit import inner
from mtp_kernels.cpu.paged_attention import TILE_ROWS, Keys, Queries, attend_wave, merge_parts
from mtp_kernels.cpu.team import share, wait
from mtp_kernels.cpu.vectors import PANEL, Rows, address, multiply_panel, rows_of
from mtp_kernels.decoder.compiled_cpu.rows import (
    BLOCK_ROWS,
    block_of,
    copy,
    norm_block,
    norm_row,
    panel_of,
    panels_of,
    project,
    rotate,
    vector,
)


class Batch(NamedTuple):
    """A BatchLayout as compiled code takes it."""

    cos_sin: Any  # [T, r]
    slots: Any  # [T]
    page_table: Any  # [b, max_pages]
    page: int
    places: Any  # [T, 2], of query_places
    tiles: Any  # of plan
    waves: Any  # of plan


class Scratch(NamedTuple):
    """Memory that the team shares during a pass; its content means nothing between layers."""

    projected: Any  # [T, query | latent | rope key, whole panels]
    queries: Any  # [T*h, c+r], in the order of tiles
    values: Any  # [T, h*v]
    normed: Any  # [T, d]
    weights: Any  # [T, k] of the picked experts
    inner: Any  # [T * experts per row, whole panels]
    picked: Any  # [T, k] experts
    parts: Any


@inner
def attention(
    member: Any, layer: Any, sizes: Any, batch: Any, cache: Any, scratch: Any, x: Any
) -> None:
    """Add attention to the stream x [T, d], and fill the layer's cache [slots, c+r]."""
    attend(member, layer, sizes, batch, cache, scratch, x)
    add_output(member, layer, sizes, scratch.values, x)
    wait(member)


@inner
def attend(
    member: Any, layer: Any, sizes: Any, batch: Any, cache: Any, scratch: Any, x: Any
) -> None:
    """Make the values that all heads attended to, and fill the layer's cache [slots, c+r]."""
    project_down(member, layer, sizes, scratch.projected, x)
    wait(member)
    fill_cache(member, layer, sizes, batch, cache, scratch.projected)
    make_queries(member, layer, sizes, batch, scratch)
    wait(member)
    queries = Queries(scratch.queries, sizes.heads, sizes.softmax_scale)
    keys = Keys(cache, batch.page_table, batch.page)
    for wave in range(batch.waves.size - 1):
        tiles = batch.tiles[batch.waves[wave] : batch.waves[wave + 1]]
        attend_wave(member, tiles, queries, keys, scratch.parts)
        wait(member)
        make_values(member, layer, sizes, tiles, scratch)
        wait(member)


@inner
def project_down(member: Any, layer: Any, sizes: Any, projected: Any, x: Any) -> None:
    """Project all rows, normed, by the member's panels."""
    normed = np.empty((BLOCK_ROWS, sizes.hidden), np.float32)
    norm = vector(layer.input_norm, sizes.hidden)
    weight = panel_of(layer.down, 0, sizes.hidden, sizes.kind)
    mine, width = share(member, projected.shape[1] // PANEL), projected.shape[1]
    for row in range(0, x.shape[0], BLOCK_ROWS):
        block = norm_block(x, row, norm, sizes.norm_eps, normed)
        project(block, weight, mine, address(projected[row]), width)


@inner
def fill_cache(member: Any, layer: Any, sizes: Any, batch: Any, cache: Any, projected: Any) -> None:
    """Write latents and rotated rope keys of the member's rows to their slots."""
    latent, norm = sizes.latent, vector(layer.latent_norm, sizes.latent)
    start = query_columns(sizes)
    first, last = share(member, batch.slots.size)
    for row in range(first, last):
        source = projected[row]
        slot = cache[batch.slots[row]]
        norm_row(source[start : start + latent], norm, sizes.norm_eps, slot[:latent])
        key = source[start + latent : start + latent + sizes.rope]
        rotate(key, batch.cos_sin[row], slot[latent:])


@inner
def query_columns(sizes: Any) -> Any:
    """Return the width of the query's part of the down projection."""
    return sizes.query_rank or sizes.heads * (sizes.nope + sizes.rope)


@inner
def make_queries(member: Any, layer: Any, sizes: Any, batch: Any, scratch: Any) -> None:
    """Make queries in the space of latents, shared out by head and block of rows."""
    count = scratch.projected.shape[0]
    blocks = -(-count // BLOCK_ROWS)
    normed = np.empty((BLOCK_ROWS, max(1, sizes.query_rank)), np.float32)
    query = np.empty((BLOCK_ROWS, panels_of(sizes.nope + sizes.rope) * PANEL), np.float32)
    latents = np.empty((BLOCK_ROWS, panels_of(sizes.latent) * PANEL), np.float32)
    first, last = share(member, sizes.heads * blocks)
    for unit in range(first, last):
        head, row = unit // blocks, unit % blocks * BLOCK_ROWS
        rows = min(BLOCK_ROWS, count - row)
        read_query(layer, sizes, scratch.projected[row : row + rows], head, normed, query)
        width = latents.shape[1]
        weight = panel_of(layer.key_up, head * (width // PANEL), sizes.nope, sizes.kind)
        block = Rows(address(query), query.shape[1], rows)
        project(block, weight, (0, width // PANEL), address(latents), width)
        for r in range(rows):
            base, stride = batch.places[row + r]
            out = scratch.queries[base + head * stride]
            copy(latents[r], out[: sizes.latent])
            q_rope = query[r, sizes.nope : sizes.nope + sizes.rope]
            rotate(q_rope, batch.cos_sin[row + r], out[sizes.latent :])


@inner
def read_query(layer: Any, sizes: Any, projected: Any, head: Any, normed: Any, query: Any) -> None:
    """Write one head's queries [rows, n+r], out of their low rank where there is one."""
    rank, size = sizes.query_rank, sizes.nope + sizes.rope
    if rank == 0:
        for r in range(projected.shape[0]):
            copy(projected[r, head * size :], query[r, :size])
        return
    norm = vector(layer.query_norm, rank)
    block = norm_block(projected[:, :rank], 0, norm, sizes.norm_eps, normed)
    width = query.shape[1]
    weight = panel_of(layer.query_up, head * (width // PANEL), rank, sizes.kind)
    project(block, weight, (0, width // PANEL), address(query), width)


@inner
def make_values(member: Any, layer: Any, sizes: Any, tiles: Any, scratch: Any) -> None:
    """Merge the parts of a wave's tiles and project each head's latents to its values."""
    heads, latent, value = sizes.heads, sizes.latent, sizes.value
    attended = np.empty((TILE_ROWS, latent), np.float32)
    width = panels_of(value) * PANEL
    values = np.empty((TILE_ROWS, width), np.float32)
    first, last = share(member, tiles.size * heads)
    for unit in range(first, last):
        tile, head = tiles[unit // heads], unit % heads
        for query in range(tile.queries):
            merge_parts(tile, query, head, heads, scratch.parts, attended[query])
        weight = panel_of(layer.value_up, head * (width // PANEL), latent, sizes.kind)
        block = Rows(address(attended), latent, tile.queries)
        project(block, weight, (0, width // PANEL), address(values), width)
        for query in range(tile.queries):
            out = scratch.values[tile.first_query + query]
            copy(values[query], out[head * value : (head + 1) * value])


@inner
def add_output(member: Any, layer: Any, sizes: Any, values: Any, x: Any) -> None:
    """Add values @ output to x, by panels of x."""
    hidden, rows = sizes.hidden, rows_of(values)
    made = np.empty((BLOCK_ROWS, PANEL), np.float32)
    first, last = share(member, panels_of(hidden))
    for panel in range(first, last):
        column = panel * PANEL
        weight = panel_of(layer.output, panel, values.shape[1], sizes.kind)
        size = min(PANEL, hidden - column)
        for row in range(0, x.shape[0], BLOCK_ROWS):
            block = block_of(rows, row, rows.count)
            multiply_panel(block, weight, address(made), PANEL)
            for r in range(block.count):
                for c in range(size):
                    x[row + r, column + c] += made[r, c]
