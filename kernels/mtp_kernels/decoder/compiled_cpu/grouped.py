"""Steps of attention whose queries share keys and values in groups, as cached side by side."""

from __future__ import annotations

from typing import Any

import numpy as np

from mtp_kernels.cpu.elementwise import sigmoid
from mtp_kernels.cpu.jit import inner
from mtp_kernels.cpu.paged_attention import merge_parts
from mtp_kernels.cpu.team import share
from mtp_kernels.decoder.compiled_cpu.rows import copy, norm_row, rotate_halves, vector


@inner
def fill_keys(member: Any, layer: Any, sizes: Any, batch: Any, cache: Any, projected: Any) -> None:
    """Write keys and values of the member's rows to their slots."""
    head, first_key = sizes.attention.head, sizes.heads * query_stride(sizes)
    work = np.empty((2, head), np.float32)
    first, last = share(member, batch.slots.size)
    for row in range(first, last):
        source, slot = projected[row], cache[batch.slots[row]]
        for start in range(0, sizes.value_at, head):
            made = slot[start : start + head]
            prepare_head(layer, layer.key_norm, sizes, source, first_key + start, work)
            rotate_halves(work[0], batch.cos_sin[row], made)
            value_at = first_key + sizes.value_at + start
            add_bias(layer, source, value_at, slot[sizes.value_at + start :][:head])


@inner
def make_grouped_queries(member: Any, layer: Any, sizes: Any, batch: Any, scratch: Any) -> None:
    """Make queries, shared out by head and row."""
    count, head = scratch.projected.shape[0], sizes.attention.head
    work = np.empty((2, head), np.float32)
    first, last = share(member, sizes.heads * count)
    for unit in range(first, last):
        number, row = unit // count, unit % count
        source = scratch.projected[row]
        start = number * query_stride(sizes)
        prepare_head(layer, layer.query_norm, sizes, source, start, work)
        base, stride = batch.places[row]
        rotate_halves(work[0], batch.cos_sin[row], scratch.queries[base + number * stride])


@inner
def query_stride(sizes: Any) -> Any:
    """Return the projected entries from a head's query to the next: a gate follows, if there are
    gates."""
    return sizes.attention.head * (2 if sizes.attention.is_gated else 1)


@inner
def prepare_head(layer: Any, norm: Any, sizes: Any, source: Any, start: Any, work: Any) -> None:
    """Write one head to work[0] [n], with its bias and normed: all that precedes its rotation."""
    if not norm:
        add_bias(layer, source, start, work[0])
        return
    add_bias(layer, source, start, work[1])
    norm_row(work[1], vector(norm, sizes.attention.head), sizes.norm_eps, work[0])


@inner
def add_bias(layer: Any, source: Any, start: Any, out: Any) -> None:
    """Write entries of a projected row from `start` on to out, their bias added."""
    copy(source[start:], out)
    if layer.bias:
        bias = vector(layer.bias, start + out.size)
        for column in range(out.size):
            out[column] += bias[start + column]


@inner
def merge_values(member: Any, layer: Any, sizes: Any, tiles: Any, scratch: Any) -> None:
    """Merge the parts of a wave's tiles to each head's values, gated where there are gates."""
    heads, head = sizes.heads, sizes.attention.head
    gate = np.empty(head, np.float32)
    first, last = share(member, tiles.size * heads)
    for unit in range(first, last):
        tile, number = tiles[unit // heads], unit % heads
        for query in range(tile.queries):
            row = tile.first_query + query
            out = scratch.values[row, number * head : (number + 1) * head]
            merge_parts(tile, query, number, heads, scratch.parts, out)
            if sizes.attention.is_gated:
                start = number * query_stride(sizes) + head
                add_bias(layer, scratch.projected[row], start, gate)
                for column in range(head):
                    out[column] *= sigmoid(gate[column])
