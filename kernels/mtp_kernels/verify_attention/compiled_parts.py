"""Verification attention in compiled parts: a tile of query rows against one block of tokens.

Blocks start at multiples of BLOCK tokens and every part is computed the same way, whatever the
batch and whichever thread does it; a row's parts are joined in order of position. So a row's bits
depend on its own query and its own tokens alone.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import carray

from mtp_kernels.compiling import compiled
from mtp_kernels.elementwise import exponential
from mtp_kernels.team import wait
from mtp_kernels.vectors import (
    BLOCK,
    PANEL,
    address,
    block_max,
    block_sum,
    dot_rows,
    floats,
    multiply,
)

TILE_ROWS = 64  # rows of queries x heads that read a block of tokens together
SHARE_ROWS = 8  # rows of a tile that a thread takes at least: as many as one product has
MAX_PARTS = 8192  # parts of rows in a wave: bounds scratch memory
UNSEEN = np.float32(-np.inf)


class Tile(NamedTuple):
    """Consecutive queries of a request. The first sees `seen` tokens, each next one more.

    `blocks` cover what the last one sees. Its parts are numbered from `first_part`: by block, then
    by query, then by head.
    """

    request: int
    first_row: int
    rows: int
    seen: int
    blocks: int
    first_part: int


class Keys(NamedTuple):
    """A layer's cache [slots, c+r], and where each request's tokens lie in it."""

    cache: Any
    page_table: Any  # [b, max_pages]
    page: int


class Parts(NamedTuple):
    """What tiles made of blocks: unnormalised sums [parts, c], and [parts] for the softmax."""

    sums: Any
    tops: Any
    masses: Any


class Queries(NamedTuple):
    """Rows [T, h, c+r] and what they share."""

    rows: Any
    latent: int
    scale: Any  # float32


@compiled
def plan(cu_q: Any, kv_lens: Any, heads: Any) -> tuple[Any, Any, Any]:
    """Tiles of a batch, in order of rows, as [n, 6]; waves [m+1] of tiles whose parts fit
    MAX_PARTS (or one tile); and the most parts that a wave has."""
    step = max(1, TILE_ROWS // heads)
    count = 0
    for request in range(kv_lens.size):
        count += -(-(cu_q[request + 1] - cu_q[request]) // step)
    tiles = np.empty((count, 6), np.int64)
    waves = np.zeros(count + 2, np.int64)
    number, wave, parts, most = 0, 1, 0, 0
    for request in range(kv_lens.size):
        end = np.int64(cu_q[request + 1])
        for row in range(np.int64(cu_q[request]), end, step):
            rows = min(step, end - row)
            seen = np.int64(kv_lens[request]) - (end - 1 - row)
            blocks = max(0, -(-(seen + rows - 1) // BLOCK))
            if parts and parts + blocks * rows * heads > MAX_PARTS:
                waves[wave] = number
                wave, parts = wave + 1, 0
            tile = tiles[number]
            tile[0], tile[1], tile[2] = request, row, rows
            tile[3], tile[4], tile[5] = seen, blocks, parts
            parts += blocks * rows * heads
            most = max(most, parts)
            number += 1
    waves[wave] = number
    return tiles, waves[: wave + 1], most


@compiled
def tile_at(tiles: Any, index: Any) -> Any:
    row = tiles[index]
    return Tile(row[0], row[1], row[2], row[3], row[4], row[5])


@compiled
def attend_wave(
    member: Any, tiles: Any, first: Any, last: Any, queries: Any, keys: Any, parts: Any
) -> None:
    """All parts of tiles [first, last), shared out among the team by blocks and groups of rows."""
    heads = queries.rows.shape[1]
    scores = np.empty((SHARE_ROWS, BLOCK), np.float32)
    total = 0
    for index in range(first, last):
        total += tiles[index, 2] * heads * max(0, tokens_of(tile_at(tiles, index)))
    done = 0
    for index in range(first, last):
        tile = tile_at(tiles, index)
        for block in range(tile.blocks):
            tokens = min(BLOCK, tokens_of(tile) - block * BLOCK)
            for row in range(0, tile.rows * heads, SHARE_ROWS):
                rows = min(SHARE_ROWS, tile.rows * heads - row)
                middle = 2 * done + rows * tokens
                if middle * member.count // (2 * total) == member.number:
                    attend_part(tile, block, row, rows, queries, keys, scores, parts)
                done += rows * tokens


@compiled
def tokens_of(tile: Any) -> Any:
    """What the last query of a tile sees."""
    return tile.seen + tile.rows - 1


@compiled
def attend_part(
    tile: Any, block: Any, row: Any, rows: Any, queries: Any, keys: Any, scores: Any, parts: Any
) -> None:
    """Rows [row, row + rows) of a tile against the tokens of one block that its last row sees."""
    heads, width = queries.rows.shape[1:]
    latent, page = queries.latent, keys.page
    first = block * BLOCK
    end = min(first + BLOCK, tokens_of(tile))
    query = address(queries.rows[tile.first_row]) + 4 * row * width
    part = tile.first_part + block * tile.rows * heads + row
    at_scores, at_sums = address(scores), address(parts.sums[part:])
    columns = latent - latent % PANEL
    token = first
    while token < end:
        run = min(end, token - token % page + page) - token
        tokens = token_address(keys, tile.request, token)
        dot_rows(
            query, width, rows, tokens, width, run, width, at_scores + 4 * (token - first), BLOCK
        )
        token += run
    weigh(tile, first, row, rows, heads, scores, queries.scale, parts, part)
    token = first
    while token < end:
        run = min(end, token - token % page + page) - token
        tokens = token_address(keys, tile.request, token)
        weights, add = at_scores + 4 * (token - first), token - first
        for column in range(0, columns, PANEL):
            multiply(
                weights,
                BLOCK,
                rows,
                tokens + 4 * column,
                width,
                run,
                at_sums + 4 * column,
                latent,
                add,
            )
        if columns < latent:
            multiply_rest(
                scores, token - first, rows, tokens, width, run, parts.sums[part:], columns
            )
        token += run


@compiled
def token_address(keys: Any, request: Any, token: Any) -> Any:
    slot = np.int64(keys.page_table[request, token // keys.page]) * keys.page + token % keys.page
    return address(keys.cache) + 4 * slot * keys.cache.shape[1]


@compiled
def multiply_rest(
    scores: Any, first: Any, rows: Any, tokens: Any, width: Any, run: Any, sums: Any, column: Any
) -> None:
    """The latent's last columns where it is no whole number of panels."""
    values = carray(floats(tokens), (run, width))
    for row in range(rows):
        for c in range(column, sums.shape[1]):
            total = sums[row, c] if first else np.float32(0.0)
            for t in range(run):
                total += scores[row, first + t] * values[t, c]
            sums[row, c] = total


@compiled
def weigh(
    tile: Any, first: Any, row: Any, rows: Any, heads: Any, scores: Any, scale: Any, parts: Any,
    part: Any,
) -> None:  # fmt: skip
    """Scores to weights exp(score - largest), in place; tokens that a row does not see get 0."""
    for r in range(rows):
        line = scores[r]
        seen = tile.seen + (row + r) // heads - first
        for t in range(BLOCK):
            line[t] = line[t] * scale if t < seen else UNSEEN
        top = block_max(address(line))
        for t in range(BLOCK):
            weight = exponential(line[t] - top)
            line[t] = weight if t < seen else np.float32(0.0)
        parts.tops[part + r] = top
        parts.masses[part + r] = block_sum(address(line))


@compiled
def add_part(
    out: Any, top: Any, mass: Any, sums: Any, other_top: Any, other_mass: Any
) -> tuple[Any, Any]:
    """Add other tokens' unnormalised sums to a row's, in place; the top and the mass of all."""
    new_top = max(top, other_top)
    old, new = exponential(top - new_top), exponential(other_top - new_top)
    for c in range(out.size):
        out[c] = out[c] * old + sums[c] * new
    return new_top, mass * old + other_mass * new


@compiled
def join(tile: Any, row: Any, head: Any, heads: Any, parts: Any, out: Any) -> Any:
    """One row and head of a tile: writes out [c], returns the log of the softmax's sum."""
    blocks = -(-(tile.seen + row) // BLOCK)
    if blocks <= 0:
        out[:] = np.float32(0.0)
        return UNSEEN
    stride = tile.rows * heads
    part = tile.first_part + row * heads + head
    top, mass = parts.tops[part], parts.masses[part]
    sums = parts.sums[part]
    for c in range(out.size):
        out[c] = sums[c]
    for _ in range(1, blocks):
        part += stride
        top, mass = add_part(out, top, mass, parts.sums[part], parts.tops[part], parts.masses[part])
    share = np.float32(1.0) / mass
    for c in range(out.size):
        out[c] *= share
    return top + np.float32(math.log(mass))


@compiled
def attend(
    member: Any, tiles: Any, waves: Any, queries: Any, keys: Any, parts: Any, out: Any, lse: Any
) -> None:
    """Every row of a batch: out [T, h, c] and lse [T, h]."""
    heads = out.shape[1]
    for wave in range(waves.size - 1):
        attend_wave(member, tiles, waves[wave], waves[wave + 1], queries, keys, parts)
        wait(member)
        for index in range(waves[wave], waves[wave + 1]):
            tile = tile_at(tiles, index)
            for number in range(tile.rows * heads):
                if number % member.count == member.number:
                    row, head = tile.first_row + number // heads, number % heads
                    lse[row, head] = join(tile, number // heads, head, heads, parts, out[row, head])
        wait(member)
