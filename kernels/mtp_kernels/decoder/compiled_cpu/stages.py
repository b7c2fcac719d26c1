"""Stages of a layer that several processes share, each a call of its own: between them rows are
gathered. They are the steps of a whole pass, so that every number has the same bits."""

from __future__ import annotations

from typing import Any

import numpy as np

from mtp_kernels.cpu.jit import compiled
from mtp_kernels.cpu.team import share
from mtp_kernels.cpu.vectors import PANEL, address, multiply_panel, rows_of
from mtp_kernels.decoder.compiled_cpu.attention import attend
from mtp_kernels.decoder.compiled_cpu.experts import make_inner, route
from mtp_kernels.decoder.compiled_cpu.rows import (
    BLOCK_ROWS,
    block_of,
    copy,
    panel_of,
    panels_of,
)


@compiled
def run_attend(
    member: Any, table: Any, sizes: Any, batch: Any, cache: Any, scratch: Any, x: Any
) -> None:
    """Make the values [T, h*v] of the heads of table[0] in scratch; cache [slots, c+r]."""
    attend(member, table[0], sizes, batch, cache, scratch, x)


@compiled
def run_route(member: Any, table: Any, sizes: Any, scratch: Any, x: Any) -> None:
    """Norm rows x [T, d] and pick their experts in scratch."""
    route(member, table[0], sizes, scratch, x)


@compiled
def run_inner(member: Any, table: Any, sizes: Any, scratch: Any, rows: Any, ends: Any) -> None:
    """Compute silu(gate) * up of pairs [ends[e], ends[e+1]) of every expert of table[0]."""
    make_inner(member, table[0], sizes, scratch, rows, ends)


@compiled
def run_down(member: Any, table: Any, sizes: Any, inner_values: Any, ends: Any, out: Any) -> None:
    """Write down(inner) [pairs, d] of every pair of an expert of table[0], by panels of the
    output."""
    layer = table[0]
    panels, inputs = panels_of(out.shape[1]), rows_of(inner_values)
    made = np.empty((BLOCK_ROWS, PANEL), np.float32)
    first, last = share(member, panels)
    for panel in range(first, last):
        column = panel * PANEL
        size = min(PANEL, out.shape[1] - column)
        for expert in range(ends.size - 1):
            number = expert * panels + panel
            packed = panel_of(layer.expert_down, number, layer.inner, sizes.entry_bytes)
            for start in range(ends[expert], ends[expert + 1], BLOCK_ROWS):
                block = block_of(inputs, start, ends[expert + 1])
                multiply_panel(block, packed, address(made), PANEL)
                for r in range(block.count):
                    copy(made[r], out[start + r, column : column + size])


@compiled
def run_add(member: Any, rows: Any, places: Any, weights: Any, outputs: Any, x: Any) -> None:
    """Add weight * output to x [T, d], pair by pair, by panels of x."""
    first, last = share(member, panels_of(x.shape[1]))
    for panel in range(first, last):
        start = panel * PANEL
        stop = min(start + PANEL, x.shape[1])
        for pair in range(rows.size):
            weight = weights[places[pair]]
            for column in range(start, stop):
                x[rows[pair], column] += weight * outputs[pair, column]
