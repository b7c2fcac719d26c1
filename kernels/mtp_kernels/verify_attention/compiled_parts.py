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

from mtp_kernels.cpu.elementwise import exponential
from mtp_kernels.cpu.jit import compiled, inner
from mtp_kernels.cpu.team import share, wait
from mtp_kernels.cpu.vectors import (
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
GROUP_ROWS = 16  # rows of a tile that a thread takes at most: two products of eight
LEAST_ROWS = 4  # and at least, while there are tiles for all threads: as many as one dot has
MAX_PARTS = 8192  # parts of rows in a wave: bounds scratch memory
UNSEEN = np.float32(-np.inf)


class Tile(NamedTuple):
    """Consecutive queries of a request. The first sees `seen` tokens, each next one more.

    Its rows are ordered by head, then by query, so that a thread keeps heads to itself. `blocks`
    cover what the last query sees; parts are numbered from `first_part` by block, then by row.
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
    """Rows [T*h, c+r] in the order of their tiles, and what they share."""

    rows: Any
    heads: int
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


@inner
def tile_at(tiles: Any, index: Any) -> Any:
    row = tiles[index]
    return Tile(row[0], row[1], row[2], row[3], row[4], row[5])


@compiled
def places_of(tiles: Any, heads: Any, queries: Any) -> Any:
    """Where the rows of each query begin in the order of tiles, and how far apart they are."""
    out = np.zeros((queries, 2), np.int64)
    for index in range(len(tiles)):
        tile = tile_at(tiles, index)
        for query in range(tile.rows):
            out[tile.first_row + query, 0] = tile.first_row * heads + query
            out[tile.first_row + query, 1] = tile.rows
    return out


@compiled
def arrange(tiles: Any, q_latent: Any, q_rope: Any) -> Any:
    """Queries [T, h, c] and [T, h, r] in the order of tiles: [T*h, c+r]."""
    queries, heads, latent = q_latent.shape
    places = places_of(tiles, heads, queries)
    out = np.empty((queries * heads, latent + q_rope.shape[2]), np.float32)
    for query in range(queries):
        for head in range(heads):
            line = out[places[query, 0] + head * places[query, 1]]
            line[:latent] = q_latent[query, head]
            line[latent:] = q_rope[query, head]
    return out


@inner
def group_size(rows: Any, tiles: Any, threads: Any) -> Any:
    """Rows of a tile that are computed together, so that there is a group for every thread."""
    if tiles >= threads:
        return GROUP_ROWS
    each = -(-rows // (threads * LEAST_ROWS)) * LEAST_ROWS
    return min(GROUP_ROWS, each)


@inner
def attend_wave(
    member: Any, tiles: Any, first: Any, last: Any, queries: Any, keys: Any, parts: Any
) -> None:
    """All parts of tiles [first, last), shared out among the team by groups of rows and blocks."""
    heads = queries.heads
    scores = np.empty((GROUP_ROWS, BLOCK), np.float32)
    total = 0
    for index in range(first, last):
        total += tiles[index, 2] * heads * max(0, tokens_of(tile_at(tiles, index)))
    done = 0
    for index in range(first, last):
        tile = tile_at(tiles, index)
        step = group_size(tile.rows * heads, last - first, member.count)
        for row in range(0, tile.rows * heads, step):
            rows = min(step, tile.rows * heads - row)
            for block in range(tile.blocks):
                tokens = min(BLOCK, tokens_of(tile) - block * BLOCK)
                middle = 2 * done + rows * tokens
                if middle * member.count // (2 * total) == member.number:
                    attend_part(tile, block, row, rows, queries, keys, scores, parts)
                done += rows * tokens


@inner
def tokens_of(tile: Any) -> Any:
    """What the last query of a tile sees."""
    return tile.seen + tile.rows - 1


@inner
def attend_part(
    tile: Any, block: Any, row: Any, rows: Any, queries: Any, keys: Any, scores: Any, parts: Any
) -> None:
    """Rows [row, row + rows) of a tile against the tokens of one block that its last row sees."""
    heads, width = queries.heads, queries.rows.shape[1]
    latent, page = queries.latent, keys.page
    first = block * BLOCK
    end = min(first + BLOCK, tokens_of(tile))
    query = address(queries.rows) + 4 * (tile.first_row * heads + row) * width
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
    weigh(tile, first, row, rows, scores, queries.scale, parts, part)
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


@inner
def token_address(keys: Any, request: Any, token: Any) -> Any:
    slot = np.int64(keys.page_table[request, token // keys.page]) * keys.page + token % keys.page
    return address(keys.cache) + 4 * slot * keys.cache.shape[1]


@inner
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


@inner
def weigh(
    tile: Any, first: Any, row: Any, rows: Any, scores: Any, scale: Any, parts: Any, part: Any
) -> None:
    """Scores to weights exp(score - largest), in place; tokens that a row does not see get 0."""
    for r in range(rows):
        line = scores[r]
        seen = tile.seen + (row + r) % tile.rows - first
        for t in range(BLOCK):
            line[t] = line[t] * scale if t < seen else UNSEEN
        top = block_max(address(line))
        for t in range(BLOCK):
            weight = exponential(line[t] - top)
            line[t] = weight if t < seen else np.float32(0.0)
        parts.tops[part + r] = top
        parts.masses[part + r] = block_sum(address(line))


@inner
def join(tile: Any, row: Any, head: Any, heads: Any, parts: Any, out: Any) -> Any:
    """One row and head of a tile: writes out [c], returns the log of the softmax's sum."""
    blocks = -(-(tile.seen + row) // BLOCK)
    if blocks <= 0:
        out[:] = np.float32(0.0)
        return UNSEEN
    apart, latent = tile.rows * heads, out.size
    first = tile.first_part + head * tile.rows + row
    top, mass = UNSEEN, np.float32(0.0)
    for block in range(blocks):
        top = max(top, parts.tops[first + block * apart])
    shares = np.empty((1, blocks), np.float32)
    for block in range(blocks):
        shares[0, block] = exponential(parts.tops[first + block * apart] - top)
        mass += parts.masses[first + block * apart] * shares[0, block]
    for block in range(blocks):
        shares[0, block] *= np.float32(1.0) / mass
    sums, width, columns = address(parts.sums[first:]), apart * latent, latent - latent % PANEL
    for column in range(0, columns, PANEL):
        at, at_out = sums + 4 * column, address(out) + 4 * column
        multiply(address(shares), 0, 1, at, width, blocks, at_out, 0, 0)
    if columns < latent:
        multiply_rest(shares, 0, 1, sums, width, blocks, out.reshape(1, latent), columns)
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
        first = waves[wave]
        begin, end = share(member, (waves[wave + 1] - first) * heads)
        for unit in range(begin, end):
            tile, head = tile_at(tiles, first + unit // heads), unit % heads
            for query in range(tile.rows):
                row = tile.first_row + query
                lse[row, head] = join(tile, query, head, heads, parts, out[row, head])
        wait(member)
