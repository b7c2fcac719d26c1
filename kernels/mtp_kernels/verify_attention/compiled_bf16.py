"""Verification attention in bf16 on a CPU: the flash recurrence, in tiles.

A thread walks its share of the batch's cache in steps of STEP_TOKENS that stay in its L2 cache. It
copies them out of their pages once, and multiplies them with all rows of the request:

    scores  [t, rows] = tokens [t, c+r] @ queries.T     tokens are the tile operand as they lie
    probs   [rows, t]                                   exp, in float32; rounded to bf16, turned
    out     [rows, c] += probs [rows, t] @ tokens [t, :c]   pairs of tokens interleaved once

Where float32 vectors multiply, tokens and queries are converted when they are copied, probs are not
rounded, and tokens are the second operand as they lie.

Shares are equal, cut at BLOCK_TOKENS of a request, so at most one request per cut is in two shares:
parts of one by several threads are merged by log-sum-exp. Bits depend on the number of threads.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from mtp_kernels.cpu.elementwise import exponential
from mtp_kernels.cpu.jit import compiled
from mtp_kernels.cpu.matrix_units import ROW_BYTES, TILE, TILE_BYTES, configure, release
from mtp_kernels.cpu.team import wait
from mtp_kernels.cpu.vectors import address
from mtp_kernels.verify_attention.bf16_packing import (
    copy_tokens,
    pack_queries,
    pack_values,
    values_of,
)
from mtp_kernels.verify_attention.bf16_units import DEPTH
from mtp_kernels.verify_attention.shares import (
    BLOCK_TOKENS,
    blocks_of,
    groups_of,
    share_of,
    slot_of,
    work_of,
)
from mtp_kernels.verify_attention.tiles import (
    ENTRY_TERMS,
    ROW_TERMS,
    TERM_BYTES,
    add_product_1_2,
    add_product_2_2,
    product_2_1,
    product_2_2,
    transpose,
)

STEP_TOKENS = 256  # copied and scored at a time
UNSEEN = np.float32(-1e30)  # finite, so that the difference of two is 0 and not NaN


class Problem(NamedTuple):
    """Arrays of one call; bf16 as int16."""

    q_latent: Any  # [T*h, c]
    q_rope: Any  # [T*h, r]
    cache: Any  # [slots, c+r]
    page_table: Any  # [b, max_pages]
    page: int
    heads: int
    scale: Any  # float32


class Scratch(NamedTuple):
    """Memory of n threads, the first dimension; g groups of 16 rows, s STEP_TOKENS.

    A term is a bf16 as int16, or the bits of a float32 where that is a tile's entry.
    """

    queries: Any  # [n, g*16, c+r] terms: entries of a row, as tiles [g, (c+r)/ROW_TERMS]
    line: Any  # [n, 16, c+r] terms: a group's rows
    tokens: Any  # [n, s, c+r+PADDING] terms
    values: Any  # [n, s, c] terms: pairs of tokens, as tiles [s/32, c/16]; no tokens of single ones
    scores: Any  # [n, g, s, 16] float32
    entries: Any  # [n, 16, 16] int32
    probs: Any  # [n, g, s*16] terms: tiles [s/ROW_TERMS] of [16, ROW_TERMS]
    sums: Any  # [n, 3, g*16, c] float32: the item in work alone, or the share's first, or last
    row_max: Any  # [n, 3, g*16] float32
    row_sum: Any  # [n, 3, g*16] float32


class State(NamedTuple):
    """Softmax state of an item's rows, as far as a thread has come."""

    sums: Any  # [g*16, c]
    row_max: Any  # [g*16]
    row_sum: Any  # [g*16]


@compiled
def attend(member: Any, items: Any, problem: Any, scratch: Any, out: Any, lse: Any) -> None:
    """Write every row of a batch: out [T*h, c] bf16 as int16, and lse [T*h]."""
    total, before = work_of(items), 0
    configure()
    for index in range(items.shape[0]):
        item = items[index]
        first, last = share_of(item, before, total, member.number, member.count)
        before += blocks_of(item) * groups_of(item)
        if first == last:
            continue
        state = state_of(scratch, member.number, slot_of(item, first, last))
        attend_item(member, item, first, last, problem, scratch, state)
        if first == 0 and last == blocks_of(item):
            for row in range(item.rows):
                store(item, row, problem, state.sums[row], state.row_max[row], state.row_sum[row],
                      out, lse)  # fmt: skip
    release()
    wait(member)
    before = 0
    for index in range(items.shape[0]):
        item = items[index]
        merge_item(member, item, before, total, problem, scratch, out, lse)
        before += blocks_of(item) * groups_of(item)


@compiled
def state_of(scratch: Any, number: Any, slot: Any) -> Any:
    return State(
        scratch.sums[number, slot], scratch.row_max[number, slot], scratch.row_sum[number, slot]
    )


@compiled
def attend_item(
    member: Any, item: Any, first: Any, last: Any, problem: Any, scratch: Any, state: Any
) -> None:
    """Attend to blocks [first, last) of an item, step by step, into `state`."""
    number, groups = member.number, groups_of(item)
    for row in range(groups * TILE):
        state.row_max[row], state.row_sum[row] = UNSEEN, np.float32(0.0)
        for c in range(state.sums.shape[1]):
            state.sums[row, c] = np.float32(0.0)
    pack_queries(item, problem, scratch.queries[number], scratch.line[number])
    end = min(last * BLOCK_TOKENS, item.tokens)
    for token in range(first * BLOCK_TOKENS, end, STEP_TOKENS):
        count = min(STEP_TOKENS, end - token)
        copy_tokens(item, token, count, problem, scratch.tokens[number])
        chunks = -(-count // DEPTH)
        if ENTRY_TERMS == 2:
            pack_values(scratch.tokens[number], chunks, scratch.values[number])
        score(groups, chunks, scratch, number)
        for group in range(groups):
            softmax_step(item, group, token, count, problem, scratch, number, state)
        add_values(groups, chunks, scratch, number, state)


@compiled
def score(groups: Any, chunks: Any, scratch: Any, number: Any) -> None:
    """Multiply the tokens with all groups of rows."""
    row, depth = scratch.tokens.shape[2] * TERM_BYTES, scratch.line.shape[2] // ROW_TERMS
    queries, scores = address(scratch.queries[number]), address(scratch.scores[number])
    group_bytes, step = depth * TILE_BYTES, STEP_TOKENS * ROW_BYTES
    for chunk in range(chunks):
        tokens = address(scratch.tokens[number]) + chunk * DEPTH * row
        for group in range(0, groups, 2):
            operands = (
                tokens, row, TILE * row, ROW_BYTES,
                queries + group * group_bytes, ROW_BYTES, group_bytes, TILE_BYTES, depth,
                scores + group * step + chunk * DEPTH * ROW_BYTES, ROW_BYTES, TILE_BYTES, step,
            )  # fmt: skip
            if group + 1 < groups:
                product_2_2(operands)
            else:
                product_2_1(operands)


@compiled
def softmax_step(
    item: Any, group: Any, first: Any, count: Any, problem: Any, scratch: Any, number: Any,
    state: Any,
) -> None:  # fmt: skip
    """Turn one group's scores into softmax terms under the new row_max; rescale earlier sums."""
    scores, probs = scratch.scores[number, group], address(scratch.probs[number, group])
    entries = scratch.entries[number]
    rows = slice(group * TILE, (group + 1) * TILE)
    old_max, row_sum = state.row_max[rows], state.row_sum[rows]
    chunks, row_max, added = -(-count // DEPTH), old_max.copy(), np.zeros(TILE, np.float32)
    hide_unseen(item, group, first, chunks, problem, scores)
    raise_max(scores, chunks, problem.scale, row_max)
    for chunk in range(chunks * DEPTH // ROW_TERMS):
        for entry in range(TILE):
            token, line = chunk * ROW_TERMS + entry * ENTRY_TERMS, entries[entry]
            even, odd = scores[token], scores[token + ENTRY_TERMS - 1]
            for r in range(TILE):
                low, high = softmax_term(even[r], row_max[r]), np.float32(0.0)
                if ENTRY_TERMS == 2:
                    high = softmax_term(odd[r], row_max[r])
                added[r] += low + high
                line[r] = entry_of(low, high)
        transpose(address(entries), ROW_BYTES, probs + chunk * TILE_BYTES)
    for r in range(TILE):
        factor = exponential(old_max[r] - row_max[r])
        old_max[r] = row_max[r]
        row_sum[r] = row_sum[r] * factor + added[r]
        if factor != np.float32(1.0):
            line = state.sums[group * TILE + r]
            for c in range(line.size):
                line[c] *= factor


@compiled
def hide_unseen(item: Any, group: Any, first: Any, chunks: Any, problem: Any, scores: Any) -> None:
    """Set scores of unseen tokens to -inf; tokens before the smallest limit are not looked at."""
    for r in range(TILE):
        row = min(group * TILE + r, item.rows - 1)
        limit = item.seen + row // problem.heads - first
        for t in range(max(0, limit), chunks * DEPTH):
            scores[t, r] = -np.inf


@compiled
def raise_max(scores: Any, chunks: Any, scale: Any, row_max: Any) -> None:
    """Scale the scores, and raise row_max [16] to the largest of each column."""
    flat, best = scores.reshape(scores.size), np.empty(4 * TILE, np.float32)
    best[:] = UNSEEN
    for start in range(0, chunks * DEPTH * TILE, 4 * TILE):  # four tokens: a loop worth vectors
        part = flat[start : start + 4 * TILE]
        for i in range(4 * TILE):
            value = part[i] * scale
            part[i] = value
            best[i] = value if value > best[i] else best[i]
    for r in range(TILE):
        pair = max(best[r], best[TILE + r])
        row_max[r] = max(row_max[r], max(pair, max(best[2 * TILE + r], best[3 * TILE + r])))


@compiled
def softmax_term(score: Any, row_max: Any) -> Any:
    """Return exp(score - row_max), 0 where the score is -inf."""
    value = exponential(score - row_max)
    return value if score != -np.inf else np.float32(0.0)


@compiled
def entry_of(low: Any, high: Any) -> Any:
    """Return the entry of two softmax terms, or of the first where it holds one."""
    if ENTRY_TERMS == 1:
        return np.float32(low).view(np.int32)
    return rounded(low) | (rounded(high) << np.int32(16))


@compiled
def rounded(value: Any) -> Any:
    """Return the bits of a float32, not NaN, as bf16: rounded to nearest, ties to even."""
    bits = np.float32(value).view(np.int32)
    odd = (bits >> np.int32(16)) & np.int32(1)
    return np.int32((bits + np.int32(0x7FFF) + odd) >> np.int32(16)) & np.int32(0xFFFF)


@compiled
def add_values(groups: Any, chunks: Any, scratch: Any, number: Any, state: Any) -> None:
    """Add softmax terms @ latents to the sums."""
    latent = state.sums.shape[1]
    probs, sums = address(scratch.probs[number]), address(state.sums)
    values, line, tile, chunk = values_of(scratch, number)
    group_bytes, row = STEP_TOKENS * TILE * TERM_BYTES, latent * 4
    steps = chunks * DEPTH // ROW_TERMS
    for c in range(0, latent, 2 * TILE):
        for group in range(0, groups, 2):
            operands = (
                probs + group * group_bytes, ROW_BYTES, group_bytes, TILE_BYTES,
                values + c // TILE * tile, line, tile, chunk, steps,
                sums + group * TILE * row + c * 4, row, TILE * row, ROW_BYTES,
            )  # fmt: skip
            if group + 1 < groups:
                add_product_2_2(operands)
            else:
                add_product_1_2(operands)


@compiled
def merge_part(
    out: Any, row_max: Any, row_sum: Any, sums: Any, other_max: Any, other_sum: Any
) -> tuple[Any, Any]:
    """Add other tokens' unnormalised sums to a row's, in place; return row_max and row_sum."""
    new_max = max(row_max, other_max)
    old, new = exponential(row_max - new_max), exponential(other_max - new_max)
    for c in range(out.size):
        out[c] = out[c] * old + sums[c] * new
    return new_max, row_sum * old + other_sum * new


@compiled
def merge_item(
    member: Any, item: Any, before: Any, total: Any, problem: Any, scratch: Any, out: Any, lse: Any
) -> None:
    """Merge an item that several threads have parts of: each merges some of its rows."""
    blocks = blocks_of(item)
    first, last = share_of(item, before, total, 0, member.count)
    begin = 0  # the thread with its first block
    while first == last:
        begin += 1
        first, last = share_of(item, before, total, begin, member.count)
    if last == blocks:
        return
    whole = np.empty(problem.q_latent.shape[1], np.float32)
    for row in range(member.number, item.rows, member.count):
        state = state_of(scratch, begin, 2)
        row_max, row_sum = state.row_max[row], state.row_sum[row]
        whole[:] = state.sums[row]
        for number in range(begin + 1, member.count):
            first, last = share_of(item, before, total, number, member.count)
            if first == last:
                continue
            part = state_of(scratch, number, 1)
            row_max, row_sum = merge_part(
                whole, row_max, row_sum, part.sums[row], part.row_max[row], part.row_sum[row]
            )
        store(item, row, problem, whole, row_max, row_sum, out, lse)


@compiled
def store(
    item: Any, row: Any, problem: Any, sums: Any, row_max: Any, row_sum: Any, out: Any, lse: Any
) -> None:
    """Write a row's result; 0 and -inf where it saw no token."""
    number = item.first_query * problem.heads + row
    if row_sum == np.float32(0.0):
        lse[number] = -np.inf
        out[number] = 0
        return
    lse[number] = row_max + np.float32(math.log(row_sum))
    share = np.float32(1.0) / row_sum
    line = out[number]
    for c in range(line.size):
        line[c] = np.int16(rounded(sums[c] * share))
