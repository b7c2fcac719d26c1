"""The attention half of a decoder layer: multi-head latent attention in its absorbed form."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from mtp_kernels.cpu.jit import inner
from mtp_kernels.cpu.team import share, wait
from mtp_kernels.cpu.vectors import PANEL, address
from mtp_kernels.decoder.rows import (
    ROWS,
    copy,
    norm_row,
    norm_rows,
    panels_of,
    project,
    rotate,
    vector,
)
from mtp_kernels.verify_attention.compiled_parts import (
    TILE_ROWS,
    Keys,
    Queries,
    attend_wave,
    join,
    tile_at,
)


class Batch(NamedTuple):
    """The rows of a pass, and whose they are."""

    turns: Any  # [T, r]
    slots: Any  # [T]
    page_table: Any  # [b, max_pages]
    page: int
    places: Any  # [T, 2]
    tiles: Any
    waves: Any


class Scratch(NamedTuple):
    """Memory that the team shares during a pass; its content means nothing between layers."""

    projected: Any  # [T, query | latent | rope key, whole panels]
    queries: Any  # [T*h, c+r], in the order of tiles
    values: Any  # [T, h*v]
    normed: Any  # [T, d]
    weights: Any  # [T, k] of the picked experts
    inner: Any  # [T * experts of a row, whole panels]
    picked: Any  # [T, k] experts
    parts: Any


@inner
def attention(
    member: Any, layer: Any, sizes: Any, batch: Any, cache: Any, scratch: Any, x: Any
) -> None:
    """Add attention to the stream x [T, d], and fill the layer's cache [slots, c+r]."""
    project_down(member, layer, sizes, scratch, x)
    wait(member)
    fill_cache(member, layer, sizes, batch, cache, scratch)
    make_queries(member, layer, sizes, batch, scratch)
    wait(member)
    queries = Queries(scratch.queries, sizes.heads, sizes.latent, sizes.attention_scale)
    keys = Keys(cache, batch.page_table, batch.page)
    for wave in range(batch.waves.size - 1):
        first, last = batch.waves[wave], batch.waves[wave + 1]
        attend_wave(member, batch.tiles, first, last, queries, keys, scratch.parts)
        wait(member)
        join_wave(member, layer, sizes, batch.tiles, first, last, scratch)
        wait(member)
    add_output(member, layer, sizes, scratch, x)
    wait(member)


@inner
def project_down(member: Any, layer: Any, sizes: Any, scratch: Any, x: Any) -> None:
    """Each member norms all rows, and multiplies them with its panels."""
    hidden, width = sizes.hidden, scratch.projected.shape[1]
    normed = np.empty((ROWS, hidden), np.float32)
    norm, mine = vector(layer.input_norm, hidden), share(member, width // PANEL)
    for row in range(0, x.shape[0], ROWS):
        rows = min(ROWS, x.shape[0] - row)
        norm_rows(x[row : row + rows], norm, sizes.norm_eps, normed)
        out = address(scratch.projected[row])
        project(address(normed), hidden, rows, layer.down, hidden, mine, out, width)


@inner
def fill_cache(member: Any, layer: Any, sizes: Any, batch: Any, cache: Any, scratch: Any) -> None:
    """Latents and turned rope keys of the member's rows to their slots."""
    latent, norm = sizes.latent, vector(layer.latent_norm, sizes.latent)
    start = query_columns(sizes)
    first, last = share(member, batch.slots.size)
    for row in range(first, last):
        source = scratch.projected[row]
        slot = cache[batch.slots[row]]
        norm_row(source[start : start + latent], norm, sizes.norm_eps, slot[:latent])
        key = source[start + latent : start + latent + sizes.rope]
        rotate(key, batch.turns[row], slot[latent:])


@inner
def query_columns(sizes: Any) -> Any:
    """How wide the query's part of the down projection is."""
    return sizes.query_rank or sizes.heads * (sizes.nope + sizes.rope)


@inner
def make_queries(member: Any, layer: Any, sizes: Any, batch: Any, scratch: Any) -> None:
    """Queries in the latent's space, by head and block of rows."""
    count = scratch.projected.shape[0]
    blocks = -(-count // ROWS)
    head_width = panels_of(sizes.nope + sizes.rope) * PANEL
    normed = np.empty((ROWS, max(1, sizes.query_rank)), np.float32)
    query = np.empty((ROWS, head_width), np.float32)
    latents = np.empty((ROWS, panels_of(sizes.latent) * PANEL), np.float32)
    first, last = share(member, sizes.heads * blocks)
    for unit in range(first, last):
        head, row = unit // blocks, unit % blocks * ROWS
        rows = min(ROWS, count - row)
        read_query(layer, sizes, scratch, head, row, rows, normed, query)
        weight = layer.key_up + 4 * head * latents.shape[1] * sizes.nope
        panels = (0, latents.shape[1] // PANEL)
        project(
            address(query), head_width, rows, weight, sizes.nope, panels,
            address(latents), latents.shape[1],
        )  # fmt: skip
        for r in range(rows):
            base, apart = batch.places[row + r]
            out = scratch.queries[base + head * apart]
            copy(latents[r], out[: sizes.latent])
            turned = query[r, sizes.nope : sizes.nope + sizes.rope]
            rotate(turned, batch.turns[row + r], out[sizes.latent :])


@inner
def read_query(
    layer: Any, sizes: Any, scratch: Any, head: Any, row: Any, rows: Any, normed: Any, query: Any
) -> None:
    """One head's queries [rows, n+r], out of their low rank where there is one."""
    rank, size = sizes.query_rank, sizes.nope + sizes.rope
    projected = scratch.projected[row : row + rows]
    if rank == 0:
        for r in range(rows):
            copy(projected[r, head * size :], query[r, :size])
        return
    norm_rows(projected[:, :rank], vector(layer.query_norm, rank), sizes.norm_eps, normed)
    width = query.shape[1]
    weight = layer.query_up + 4 * head * width * rank
    panels = (0, width // PANEL)
    project(address(normed), rank, rows, weight, rank, panels, address(query), width)


@inner
def join_wave(
    member: Any, layer: Any, sizes: Any, tiles: Any, first: Any, last: Any, scratch: Any
) -> None:
    """Join the parts of tiles [first, last) and take each head's values out of the latents."""
    heads, latent, value = sizes.heads, sizes.latent, sizes.value
    attended = np.empty((TILE_ROWS, latent), np.float32)
    width = panels_of(value) * PANEL
    values = np.empty((TILE_ROWS, width), np.float32)
    begin, end = share(member, (last - first) * heads)
    for unit in range(begin, end):
        tile, head = tile_at(tiles, first + unit // heads), unit % heads
        for row in range(tile.rows):
            join(tile, row, head, heads, scratch.parts, attended[row])
        weight = layer.value_up + 4 * head * width * latent
        panels = (0, width // PANEL)
        project(
            address(attended), latent, tile.rows, weight, latent, panels, address(values), width
        )
        for row in range(tile.rows):
            out = scratch.values[tile.first_row + row]
            copy(values[row], out[head * value : (head + 1) * value])


@inner
def add_output(member: Any, layer: Any, sizes: Any, scratch: Any, x: Any) -> None:
    """x += values @ output, by panels of x."""
    depth, hidden = scratch.values.shape[1], sizes.hidden
    made = np.empty((ROWS, PANEL), np.float32)
    first, last = share(member, panels_of(hidden))
    for panel in range(first, last):
        column = panel * PANEL
        weight = layer.output + 4 * column * depth
        size = min(PANEL, hidden - column)
        for row in range(0, x.shape[0], ROWS):
            rows = min(ROWS, x.shape[0] - row)
            source = address(scratch.values[row])
            project(source, depth, rows, weight, depth, (0, 1), address(made), PANEL)
            for r in range(rows):
                for c in range(size):
                    x[row + r, column + c] += made[r, c]
