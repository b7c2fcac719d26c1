"""Operands of the products of bf16 attention: terms in the order in which a unit takes them.

A term is a bf16 as int16, or the bits of a float32 where that is a tile's entry.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mtp_kernels.cpu.jit import compiled
from mtp_kernels.cpu.matrix_units import ROW_BYTES, TILE, TILE_BYTES
from mtp_kernels.cpu.vectors import address
from mtp_kernels.verify_attention.bf16_units import DEPTH
from mtp_kernels.verify_attention.shares import groups_of
from mtp_kernels.verify_attention.tiles import (
    ENTRY_TERMS,
    ROW_TERMS,
    TERM_BYTES,
    interleave,
    transpose,
)

PADDING = 16 if ENTRY_TERMS == 1 else 0  # terms after a token: an odd number of cache lines


@compiled
def term(bits: Any) -> Any:
    """Return a bf16, given as int16, as it is packed."""
    if ENTRY_TERMS == 1:
        return np.int32(bits) << np.int32(16)
    return bits


@compiled
def pack_queries(item: Any, problem: Any, queries: Any, line: Any) -> None:
    """Pack rows as the second operand: by group and chunk, an entry of 16 rows after the other."""
    latent, width = problem.q_latent.shape[1], line.shape[1]
    source, target = address(line), address(queries)
    start = item.first_query * problem.heads
    for group in range(groups_of(item)):
        for r in range(TILE):
            row = group * TILE + r
            if row < item.rows:
                for c in range(latent):
                    line[r, c] = term(problem.q_latent[start + row, c])
                for c in range(width - latent):
                    line[r, latent + c] = term(problem.q_rope[start + row, c])
            else:
                for c in range(width):
                    line[r, c] = 0
        for chunk in range(width // ROW_TERMS):
            transpose(source + chunk * ROW_BYTES, width * TERM_BYTES, target)
            target += TILE_BYTES


@compiled
def copy_tokens(item: Any, first: Any, count: Any, problem: Any, tokens: Any) -> None:
    """Copy tokens [first, first + count) side by side, and zeros up to whole tiles."""
    page = problem.page
    for t in range(count):
        token = first + t
        slot = np.int64(problem.page_table[item.request, token // page]) * page + token % page
        for c in range(problem.cache.shape[1]):
            tokens[t, c] = term(problem.cache[slot, c])
    for t in range(count, -(-count // DEPTH) * DEPTH):
        for c in range(tokens.shape[1]):
            tokens[t, c] = 0


@compiled
def pack_values(tokens: Any, chunks: Any, values: Any) -> None:
    """Pack latents as the second operand: by 32 tokens and 16 entries, pairs of tokens."""
    source, target = address(tokens), address(values)
    stride, latent = tokens.shape[1] * TERM_BYTES, values.shape[1]
    for chunk in range(chunks):
        for pair in range(TILE):
            line = source + (chunk * DEPTH + 2 * pair) * stride
            place = target + chunk * (latent // TILE) * TILE_BYTES + pair * ROW_BYTES
            for c in range(0, latent, DEPTH):
                at = line + c * TERM_BYTES
                interleave(at, at + stride, place + c // TILE * TILE_BYTES)


@compiled
def values_of(scratch: Any, number: Any) -> tuple[Any, Any, Any, Any]:
    """Return latents as the second operand: address, and steps to the next line, tile and chunk."""
    if ENTRY_TERMS == 1:  # they lie so
        line = scratch.tokens.shape[2] * TERM_BYTES
        return address(scratch.tokens[number]), line, ROW_BYTES, TILE * line
    chunk = scratch.values.shape[2] // TILE * TILE_BYTES
    return address(scratch.values[number]), ROW_BYTES, TILE_BYTES, chunk
