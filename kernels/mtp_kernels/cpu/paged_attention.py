"""Attention over a paged float32 cache in parts: a tile of query rows against a block of tokens.

Blocks start at multiples of BLOCK tokens and every part is computed the same way, whatever the
batch and whichever thread does it; a row's parts are merged in order of position. So a row's bits
depend on its own query and its own tokens alone.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import carray

from mtp_kernels.cpu.elementwise import exponential
from mtp_kernels.cpu.jit import inner
from mtp_kernels.cpu.panel_forms import PANEL
from mtp_kernels.cpu.panels import multiply
from mtp_kernels.cpu.team import owns
from mtp_kernels.cpu.vectors import BLOCK, Rows, address, block_max, block_sum, dot_rows, floats

TILE_ROWS = 64  # rows of queries x heads that read a block of tokens together
GROUP_ROWS = 16  # rows of a tile that a thread takes at most: two products of eight
LEAST_ROWS = 4  # and at least, while there are tiles for all threads: as many as one dot has
MAX_PARTS = 8192  # parts of rows in a wave: bounds scratch memory
UNSEEN = np.float32(-np.inf)

# Consecutive queries of a request. Its rows are ordered by head, then by query, so that a thread
# keeps heads to itself; parts are numbered by block, then by row.
TILE = np.dtype(
    [
        ("request", np.int64),
        ("first_query", np.int64),
        ("queries", np.int64),
        ("seen", np.int64),  # tokens that the first query sees; each next one sees one more
        ("blocks", np.int64),  # of tokens that the last query sees
        ("first_part", np.int64),
    ]
)


class Keys(NamedTuple):
    """A layer's cache, and where each request's tokens lie in it.

    A slot begins with its keys, one for every so many heads; a value lies value_at floats behind
    its key.
    """

    cache: Any  # [slots, width of a slot]
    page_table: Any  # [b, max_pages]
    page: int
    kv_heads: int
    value_at: int


class Parts(NamedTuple):
    """Softmax terms of rows over blocks: exp(score - row_max), their sum, and their products."""

    sums: Any  # [parts, width of a value], of terms and values
    row_max: Any  # [parts]
    row_sum: Any  # [parts]


class Queries(NamedTuple):
    """Rows in the order of their tiles, and the sizes they share."""

    rows: Any  # [T*h, width of a key]
    heads: int
    scale: Any  # float32


@inner
def plan(cu_q: Any, kv_lens: Any, heads: Any) -> tuple[Any, Any, Any]:
    """Return tiles of a batch, in order of rows; waves [m+1] of tiles whose parts fit MAX_PARTS (or
    one tile); and the largest number of parts of a wave."""
    step = max(1, TILE_ROWS // heads)
    count = 0
    for request in range(kv_lens.size):
        count += -(-(cu_q[request + 1] - cu_q[request]) // step)
    tiles = np.empty(count, TILE)
    waves = np.zeros(count + 2, np.int64)
    number, wave, parts, most = 0, 1, 0, 0
    for request in range(kv_lens.size):
        end = np.int64(cu_q[request + 1])
        for query in range(np.int64(cu_q[request]), end, step):
            queries = min(step, end - query)
            seen = np.int64(kv_lens[request]) - (end - 1 - query)
            blocks = max(0, -(-(seen + queries - 1) // BLOCK))
            if parts and parts + blocks * queries * heads > MAX_PARTS:
                waves[wave] = number
                wave, parts = wave + 1, 0
            tile = tiles[number]
            tile.request, tile.first_query, tile.queries = request, query, queries
            tile.seen, tile.blocks, tile.first_part = seen, blocks, parts
            parts += blocks * queries * heads
            most = max(most, parts)
            number += 1
    waves[wave] = number
    return tiles, waves[: wave + 1], most


@inner
def query_places(tiles: Any, heads: Any, queries: Any) -> Any:
    """Return [T, 2]: each query's first row in the order of tiles, and the rows between heads."""
    out = np.zeros((queries, 2), np.int64)
    for index in range(len(tiles)):
        tile = tiles[index]
        for query in range(tile.queries):
            out[tile.first_query + query, 0] = tile.first_query * heads + query
            out[tile.first_query + query, 1] = tile.queries
    return out


@inner
def group_size(rows: Any, tiles: Any, threads: Any) -> Any:
    """Return the number of a tile's rows that are computed together, so that every thread has
    some."""
    if tiles >= threads:
        return GROUP_ROWS
    each = -(-rows // (threads * LEAST_ROWS)) * LEAST_ROWS
    return min(GROUP_ROWS, each)


@inner
def attend_wave(member: Any, tiles: Any, queries: Any, keys: Any, parts: Any) -> None:
    """Compute all parts of a wave's tiles, shared out by groups of rows and blocks."""
    heads = queries.heads
    scores = np.empty((GROUP_ROWS, BLOCK), np.float32)
    total = 0
    for index in range(tiles.size):
        total += tiles[index].queries * heads * max(0, tokens_of(tiles[index]))
    done = 0
    for index in range(tiles.size):
        tile = tiles[index]
        step = group_size(tile.queries * heads, tiles.size, member.count)
        span = rows_per_key(tile, queries, keys)
        for row in range(0, tile.queries * heads, span):
            for start in range(row, row + span, step):
                rows = min(step, row + span - start)
                for block in range(tile.blocks):
                    cost = rows * min(BLOCK, tokens_of(tile) - block * BLOCK)
                    if owns(member, done, cost, total):
                        attend_part(tile, block, (start, rows), scores, queries, keys, parts)
                    done += cost


@inner
def rows_per_key(tile: Any, queries: Any, keys: Any) -> Any:
    """Return the number of consecutive rows of a tile that share a key."""
    return tile.queries * (queries.heads // keys.kv_heads)


@inner
def tokens_of(tile: Any) -> Any:
    """Return the number of tokens that the last query of a tile sees."""
    return tile.seen + tile.queries - 1


@inner
def attend_part(
    tile: Any, block: Any, group: Any, scores: Any, queries: Any, keys: Any, parts: Any
) -> None:
    """Attend from a group (first row, rows) of a tile, which share a key, to the block's tokens
    they may see."""
    row, rows = group
    width, value = queries.rows.shape[1], parts.sums.shape[1]
    key_at = row // rows_per_key(tile, queries, keys) * width
    first = block * BLOCK
    end = min(first + BLOCK, tokens_of(tile))
    at_query = address(queries.rows) + 4 * (tile.first_query * queries.heads + row) * width
    query, at_scores = Rows(at_query, width, rows), address(scores)
    token = first
    while token < end:
        tokens = tokens_in_page(keys, tile.request, token, end, key_at)
        dot_rows(query, tokens, width, at_scores + 4 * (token - first), BLOCK)
        token += tokens.count
    part = tile.first_part + block * tile.queries * queries.heads + row
    softmax_terms(tile, first, group, scores, queries.scale, parts, part)
    at_sums = address(parts.sums) + 4 * part * value
    token = first
    while token < end:
        tokens = tokens_in_page(keys, tile.request, token, end, key_at + keys.value_at)
        terms = Rows(at_scores + 4 * (token - first), BLOCK, rows)
        add_products(terms, tokens, at_sums, value, token - first)
        token += tokens.count


@inner
def tokens_in_page(keys: Any, request: Any, token: Any, end: Any, column: Any) -> Any:
    """Return the rows of tokens [token, end), from a column on, as far as they lie in one page."""
    page, width = keys.page, keys.cache.shape[1]
    slot = np.int64(keys.page_table[request, token // page]) * page + token % page
    count = min(end, token - token % page + page) - token
    return Rows(address(keys.cache) + 4 * (slot * width + column), width, count)


@inner
def softmax_terms(
    tile: Any, first: Any, group: Any, scores: Any, scale: Any, parts: Any, part: Any
) -> None:
    """Replace scores by exp(score - row_max), 0 for tokens that a row does not see."""
    for r in range(group[1]):
        line = scores[r]
        seen = tile.seen + (group[0] + r) % tile.queries - first
        for t in range(BLOCK):
            line[t] = line[t] * scale if t < seen else UNSEEN
        row_max = block_max(address(line))
        for t in range(BLOCK):
            term = exponential(line[t] - row_max)
            line[t] = term if t < seen else np.float32(0.0)
        parts.row_max[part + r] = row_max
        parts.row_sum[part + r] = block_sum(address(line))


@inner
def add_products(terms: Any, values: Any, out: Any, width: Any, add: Any) -> None:
    """Write terms @ values[:, :width] to rows at address `out`, added if `add` is not 0."""
    whole = width - width % PANEL
    for column in range(0, whole, PANEL):
        part = Rows(values.at + 4 * column, values.stride, values.count)
        multiply(terms, part, out + 4 * column, width, add)
    for row in range(terms.count if whole < width else 0):
        factors = carray(floats(terms.at + 4 * row * terms.stride), (values.count,))
        sums = carray(floats(out + 4 * row * width), (width,))
        for c in range(whole, width):
            total = sums[c] if add else np.float32(0.0)
            for t in range(values.count):
                total += factors[t] * carray(floats(values.at + 4 * t * values.stride), (width,))[c]
            sums[c] = total


@inner
def _add_shares(shares: Any, sums: Any, out: Any) -> None:
    """Write shares @ sums to out. Whoever calls keeps the arrays for as long as this runs, while an
    array of one's own is freed after its last use, which taking its address may be."""
    add_products(Rows(address(shares), 0, 1), sums, address(out), out.size, 0)


@inner
def merge_parts(tile: Any, query: Any, head: Any, heads: Any, parts: Any, out: Any) -> Any:
    """Write one query and head's attention to out [width of a value]; return the log of its
    softmax's sum."""
    blocks = -(-(tile.seen + query) // BLOCK)
    if blocks <= 0:
        out[:] = np.float32(0.0)
        return UNSEEN
    stride = tile.queries * heads  # parts from block to block
    first = tile.first_part + head * tile.queries + query
    row_max, row_sum = UNSEEN, np.float32(0.0)
    for block in range(blocks):
        row_max = max(row_max, parts.row_max[first + block * stride])
    shares = np.empty(blocks, np.float32)
    for block in range(blocks):
        shares[block] = exponential(parts.row_max[first + block * stride] - row_max)
        row_sum += parts.row_sum[first + block * stride] * shares[block]
    for block in range(blocks):
        shares[block] *= np.float32(1.0) / row_sum
    sums = Rows(address(parts.sums[first:]), stride * out.size, blocks)
    _add_shares(shares, sums, out)
    return row_max + np.float32(math.log(row_sum))
