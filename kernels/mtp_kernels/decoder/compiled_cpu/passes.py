"""Passes over rows, each run by a team of threads: layers, norms, projections."""

from __future__ import annotations

from typing import Any

import numpy as np

from mtp_kernels.cpu.jit import compiled, inner
from mtp_kernels.cpu.team import share
from mtp_kernels.cpu.vectors import PANEL, address, multiply_panel, rows_of
from mtp_kernels.decoder.compiled_cpu.attention import attention
from mtp_kernels.decoder.compiled_cpu.experts import feed_forward
from mtp_kernels.decoder.compiled_cpu.rows import (
    BLOCK_ROWS,
    block_of,
    copy,
    norm_rows,
    panel_of,
    panels_of,
)


@inner
def run_layers(
    member: Any, table: Any, sizes: Any, batch: Any, caches: Any, scratch: Any, x: Any
) -> None:
    """Run the stream x [T, d] through all layers, in place; caches [layers, slots, slot]."""
    for index in range(table.size):
        layer = table[index]
        attention(member, layer, sizes, batch, caches[index], scratch, x)
        feed_forward(member, layer, sizes, scratch, x)


@compiled
def run_norm(member: Any, x: Any, weight: Any, eps: Any, out: Any) -> None:
    """Write the RMS norm of rows [T, d]."""
    first, last = share(member, x.shape[0])
    norm_rows(x[first:last], weight, eps, out[first:last])


@compiled
def run_project(member: Any, x: Any, weight: Any, out: Any) -> None:
    """Write x [T, d] times a weight, given as its first panel, to out [T, n], by panels."""
    columns, rows = out.shape[1], rows_of(x)
    made = np.empty((BLOCK_ROWS, PANEL), np.float32)
    first, last = share(member, panels_of(columns))
    for panel in range(first, last):
        start = panel * PANEL
        size = min(PANEL, columns - start)
        packed = panel_of(weight.at, panel, weight.count, weight.entry_bytes)
        for row in range(0, x.shape[0], BLOCK_ROWS):
            block = block_of(rows, row, rows.count)
            multiply_panel(block, packed, address(made), PANEL)
            for r in range(block.count):
                copy(made[r], out[row + r, start : start + size])
