"""Attention half of a decoder layer, around the steps of latent and of grouped-query attention."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba.extending import overload

from mtp_kernels.cpu.jit import compiled, inner
from mtp_kernels.cpu.paged_attention import Keys, Queries, attend_wave, plan, query_places
from mtp_kernels.cpu.panel_forms import PANEL
from mtp_kernels.cpu.team import share, wait
from mtp_kernels.cpu.vectors import address, rows_of
from mtp_kernels.decoder.compiled_cpu.grouped import (
    fill_keys,
    make_grouped_queries,
    merge_values,
)
from mtp_kernels.decoder.compiled_cpu.latent import (
    fill_latents,
    make_latent_queries,
    project_values,
)
from mtp_kernels.decoder.compiled_cpu.rows import (
    BLOCK_ROWS,
    STRIP,
    STRIP_PANELS,
    block_of,
    cos_sin_of,
    norm_block,
    panel_of,
    panels_of,
    project,
    vector,
)
from mtp_kernels.sizes import GroupedSizes, LatentSizes


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

    projected: Any  # [T, outputs of the first projection, whole panels]
    queries: Any  # [T*h, width of a key], in the order of tiles
    values: Any  # [T, h*v]
    normed: Any  # [T, d]
    weights: Any  # [T, k] of the picked experts
    shared_weights: Any  # [T] of shared experts
    inner: Any  # [T * experts per row, whole panels]
    picked: Any  # [T, k] experts
    parts: Any
    attention_input: Any  # [T, w], what the attention of a first layer without an input norm takes


# Steps by kind of attention: fill the cache, make queries, make values of a wave's parts.
_STEPS = {
    LatentSizes: (fill_latents, make_latent_queries, project_values),
    GroupedSizes: (fill_keys, make_grouped_queries, merge_values),
}


def _begin(member: Any, layer: Any, sizes: Any, batch: Any, cache: Any, scratch: Any) -> None:
    """Fill the cache and make queries; compiled by the overload below."""
    raise NotImplementedError


def _end(member: Any, layer: Any, sizes: Any, tiles: Any, scratch: Any) -> None:
    """Make the values of a wave's tiles; compiled by the overload below."""
    raise NotImplementedError


@overload(_begin)
def _begin_overload(
    member: Any, layer: Any, sizes: Any, batch: Any, cache: Any, scratch: Any
) -> Any:
    fill, make_queries, _ = _steps(sizes)

    def begin(member: Any, layer: Any, sizes: Any, batch: Any, cache: Any, scratch: Any) -> None:
        fill(member, layer, sizes, batch, cache, scratch.projected)
        make_queries(member, layer, sizes, batch, scratch)

    return begin


@overload(_end)
def _end_overload(member: Any, layer: Any, sizes: Any, tiles: Any, scratch: Any) -> Any:
    _, _, make_values = _steps(sizes)

    def end(member: Any, layer: Any, sizes: Any, tiles: Any, scratch: Any) -> None:
        make_values(member, layer, sizes, tiles, scratch)

    return end


def _steps(sizes: Any) -> tuple[Any, Any, Any]:
    """Return the steps of a numba type of Sizes."""
    return _STEPS[dict(zip(sizes.fields, sizes, strict=True))["attention"].instance_class]


@compiled
def plan_pass(cu_q: Any, kv_lens: Any, positions: Any, rope: Any, heads: Any) -> Any:
    """Return tiles, waves and the largest number of parts of a wave, as plan does, cos_sin [T, r]
    of positions [T], and the places of queries."""
    tiles, waves, parts = plan(cu_q, kv_lens, heads)
    places = query_places(tiles, heads, positions.size)
    return tiles, waves, parts, cos_sin_of(positions, rope), places


@inner
def attention(
    member: Any, layer: Any, sizes: Any, batch: Any, cache: Any, scratch: Any, x: Any
) -> None:
    """Add attention to the stream x [T, d], and fill the layer's cache [slots, slot]."""
    attend(member, layer, sizes, batch, cache, scratch, x)
    add_output(member, layer, sizes, scratch.values, x)
    wait(member)


@inner
def attend(
    member: Any, layer: Any, sizes: Any, batch: Any, cache: Any, scratch: Any, x: Any
) -> None:
    """Make the values that all heads attended to, and fill the layer's cache [slots, slot]."""
    project_rows(member, layer, sizes, scratch, x)
    wait(member)
    _begin(member, layer, sizes, batch, cache, scratch)
    wait(member)
    queries = Queries(scratch.queries, sizes.heads, sizes.softmax_scale)
    keys = Keys(cache, batch.page_table, batch.page, sizes.kv_heads, sizes.value_at)
    for wave in range(batch.waves.size - 1):
        tiles = batch.tiles[batch.waves[wave] : batch.waves[wave + 1]]
        attend_wave(member, tiles, queries, keys, scratch.parts)
        wait(member)
        _end(member, layer, sizes, tiles, scratch)
        wait(member)


@inner
def project_rows(member: Any, layer: Any, sizes: Any, scratch: Any, x: Any) -> None:
    """Project all rows, normed or as they are given, by the member's panels."""
    normed = np.empty((BLOCK_ROWS, sizes.hidden), np.float32)
    norm, given = vector(layer.input_norm, sizes.hidden), rows_of(scratch.attention_input)
    projected = scratch.projected
    depth = sizes.hidden if layer.input_norm else given.stride
    weight = panel_of(layer.down, layer.down_form, 0, depth)
    if layer.qkv:
        weight = panel_of(layer.qkv, layer.qkv_form, 0, depth)
    mine, width = share(member, projected.shape[1] // PANEL), projected.shape[1]
    for row in range(0, x.shape[0], BLOCK_ROWS):
        if layer.input_norm:
            block = norm_block(x, row, norm, sizes.norm_eps, normed)
        else:
            block = block_of(given, row, given.count)
        project(block, weight, mine, address(projected[row]), width)


@inner
def add_output(member: Any, layer: Any, sizes: Any, values: Any, x: Any) -> None:
    """Add values @ output to x, by panels of x."""
    hidden, rows = sizes.hidden, rows_of(values)
    made = np.empty((BLOCK_ROWS, STRIP), np.float32)
    first, last = share(member, panels_of(hidden))
    for panel in range(first, last, STRIP_PANELS):
        column, count = panel * PANEL, min(STRIP_PANELS, last - panel)
        weight = panel_of(layer.output, layer.output_form, panel, values.shape[1])
        size = min(count * PANEL, hidden - column)
        for row in range(0, x.shape[0], BLOCK_ROWS):
            block = block_of(rows, row, rows.count)
            project(block, weight, (0, count), address(made), STRIP)
            for r in range(block.count):
                out = x[row + r, column : column + size]
                for c in range(size):
                    out[c] += made[r, c]
