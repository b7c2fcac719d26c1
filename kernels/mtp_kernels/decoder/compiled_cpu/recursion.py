"""Passes through the layers, and greedy drafts of a module by recursion, each from the token and
hidden state before it.

All drafts of a batch are one launch of a team of threads, which costs more than one draft. Of
equally good tokens the first is drafted. Both are one compiled function, since nearly all of its
code is the layers'.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import carray

from mtp_kernels.cpu.code import FLOAT_BYTES
from mtp_kernels.cpu.jit import compiled, inner
from mtp_kernels.cpu.paged_attention import MAX_PARTS, TILE
from mtp_kernels.cpu.panel_forms import FLOAT32, Panel
from mtp_kernels.cpu.team import share, wait
from mtp_kernels.cpu.vectors import BLOCK, address, borrowed, halves, words
from mtp_kernels.decoder.compiled_cpu.attention import Batch, Scratch, plan_pass
from mtp_kernels.decoder.compiled_cpu.passes import (
    Product,
    best_of,
    best_product,
    run_layers,
    run_project,
    whole_product,
)
from mtp_kernels.decoder.compiled_cpu.rows import copy, norm_row, norm_rows, vector


class Module(NamedTuple):
    """The weights of a module around its layer. Matrices are packed in panels."""

    embedding: Any  # [vocab, d], as a Panel with the number of columns
    embedding_norm: Any  # [d]
    hidden_norm: Any  # [d]
    projection: Any  # 2d to d, as its first panel; at address 0 where the layer takes both halves
    head_norm: Any  # [d]
    head: Any  # d to n, as its first panel
    tokens: Any  # [n] of the head's outputs
    eps: Any  # float32, of the three norms
    recycles_normed: bool  # the next draft takes the hidden state after the head's norm
    normed_residual: bool  # without a projection: the layer's stream is the normed hidden state


class Chains(NamedTuple):
    """Requests that draft, those with most drafts first, and where their caches lie."""

    starts: Any  # [b] position of the row that made the hidden state
    counts: Any  # [b] drafts of each, at least 1
    page_table: Any  # [b, max_pages]
    page: int
    rope: Any  # (inv_freq [r/2], attention scaling)


class Drafting(NamedTuple):
    """A module, the requests that draft with it, and memory for what they draft."""

    module: Module
    chains: Chains
    best: Product  # of the head
    stream: Product  # of the projection, to x
    tokens: Any  # [b, most drafts]


def no_drafting() -> Drafting:
    """Return the drafting of a pass that drafts nothing."""
    floats, table, numbers = np.empty(0, np.float32), np.empty((0, 0), np.float32), np.empty(0, int)
    return Drafting(
        Module(
            embedding=Panel(0, 0, 0),
            embedding_norm=floats,
            hidden_norm=floats,
            projection=Panel(0, 0, 0),
            head_norm=floats,
            head=Panel(0, 0, 0),
            tokens=numbers,
            eps=np.float32(0),
            recycles_normed=False,
            normed_residual=False,
        ),
        Chains(numbers, numbers, np.empty((0, 0), np.int32), 0, (floats, np.float32(0))),
        best=best_product(0, 0, 0),
        stream=whole_product(table),
        tokens=np.empty((0, 0), int),
    )


@compiled
def run(
    member: Any, table: Any, sizes: Any, batch: Any, caches: Any, scratch: Any, x: Any,
    drafting: Any,
) -> None:  # fmt: skip
    """Run the stream x [T, d] through all layers, in place; caches [layers, slots, slot].

    With requests that draft: write tokens [b, most drafts] for hidden states x [b, d], which are
    overwritten, and leave the batch alone.
    """
    batch, caches, scratch, x, drafting = borrowed((batch, caches, scratch, x, drafting))
    if drafting.tokens.size == 0:
        run_layers(member, table, sizes, batch, caches, scratch, x)
    else:
        draft(member, table, sizes, caches, scratch, x, drafting)


@inner
def look_up(table: Any, token: Any, out: Any) -> None:
    """Write a token's row of a table, float32 or bf16, to out [d]."""
    at = token * table.count
    if table.form == FLOAT32:
        copy(vector(table.at + FLOAT_BYTES * at, table.count), out)
    else:
        row = carray(halves(table.at), (at + out.size,))
        bits = carray(words(address(out)), (out.size,))
        for column in range(out.size):
            bits[column] = np.uint32(row[at + column]) << np.uint32(16)


@inner
def draft(
    member: Any, table: Any, sizes: Any, caches: Any, scratch: Any, x: Any, drafting: Any
) -> None:
    """Write the tokens of all requests."""
    module, chains, found, stream, tokens = drafting
    best = found.best
    rows, hidden = x.shape
    normed, both = np.empty((rows, hidden), np.float32), np.empty((rows, 2 * hidden), np.float32)
    embedded = np.empty(hidden, np.float32)
    for step in range(tokens.shape[1]):
        rows = growing(chains, step)
        norm_rows(x[:rows], module.head_norm, module.eps, normed)
        run_project(member, normed[:rows], module.head, found)
        wait(member)
        for row in range(rows):  # every member writes the same
            tokens[row, step] = module.tokens[best_of(best, row)]
        rows = growing(chains, step + 1)
        if rows == 0:
            return
        for row in range(rows):
            source = normed[row] if module.recycles_normed else x[row]
            norm_row(source, module.hidden_norm, module.eps, both[row, hidden:])
            look_up(module.embedding, module.tokens[best_of(best, row)], embedded)
            norm_row(embedded, module.embedding_norm, module.eps, both[row, :hidden])
        wait(member)
        if module.projection.at:
            run_project(member, both[:rows], module.projection, stream)
        else:
            write_residual(member, module, normed[:rows], both[:rows], x[:rows])
        wait(member)
        batch = batch_of(chains, rows, step + 1, sizes.heads)
        own = part_of(scratch, both[:rows], sizes)
        run_layers(member, table, sizes, batch, caches, own, x[:rows])


@inner
def write_residual(member: Any, module: Module, normed: Any, both: Any, x: Any) -> None:
    """Write what the layer's output is added to, of the member's rows, over hidden states x."""
    first, last = share(member, x.shape[0])
    for row in range(first, last):
        if module.normed_residual:
            copy(both[row, x.shape[1] :], x[row])
        elif module.recycles_normed:
            copy(normed[row], x[row])


@inner
def growing(chains: Any, step: Any) -> Any:
    """Return the number of chains with more than `step` drafts."""
    rows = 0
    while rows < chains.counts.size and chains.counts[rows] > step:
        rows += 1
    return rows


@inner
def batch_of(chains: Any, rows: Any, step: Any, heads: Any) -> Batch:
    """Return the batch of one draft: a row per growing chain, `step` positions behind its start."""
    positions, slots = np.empty(rows, np.int64), np.empty(rows, np.int64)
    ends, lengths = np.empty(rows + 1, np.int32), np.empty(rows, np.int32)
    ends[0] = 0
    for row in range(rows):
        at = chains.starts[row] + step
        positions[row] = at
        slots[row] = chains.page_table[row, at // chains.page] * chains.page + at % chains.page
        ends[row + 1], lengths[row] = row + 1, at + 1
    tiles, waves, _, cos_sin, places = plan_pass(ends, lengths, positions, chains.rope, heads)
    return Batch(cos_sin, slots, chains.page_table, chains.page, places, tiles, waves)


def no_batch(chains: Chains) -> Batch:
    """Return the batch of a pass that drafts."""
    return Batch(
        cos_sin=np.empty((0, 0), np.float32),
        slots=np.empty(0, int),
        page_table=chains.page_table,
        page=chains.page,
        places=np.empty((0, 0), int),
        tiles=np.empty(0, TILE),
        waves=np.empty(0, int),
    )


def most_parts(chains: Chains, heads: int) -> int:
    """Return as many parts as a wave of any draft has at most: all of the last one's, or as many as
    fit a wave."""
    parts = -(-(chains.starts + chains.counts) // BLOCK) * heads
    return int(min(parts.sum(), max(MAX_PARTS, parts.max())))


@inner
def part_of(scratch: Any, attention_input: Any, sizes: Any) -> Scratch:
    """Return the part of the scratch memory that the first rows use, those of attention_input."""
    rows = attention_input.shape[0]
    return Scratch(
        scratch.projected[:rows],
        scratch.queries[: rows * sizes.heads],
        scratch.values[:rows],
        scratch.normed[:rows],
        scratch.weights[:rows],
        scratch.shared_weights[:rows],
        scratch.inner,
        scratch.picked[:rows],
        scratch.parts,
        attention_input,
    )
