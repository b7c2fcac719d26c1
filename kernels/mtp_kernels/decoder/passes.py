"""Whole passes, each run by a team of threads: layers, norms, projections."""

from __future__ import annotations

from typing import Any

import numpy as np

from mtp_kernels.cpu.jit import compiled, inner
from mtp_kernels.cpu.team import share
from mtp_kernels.cpu.vectors import PANEL, address
from mtp_kernels.decoder.attention import attention
from mtp_kernels.decoder.experts import feed_forward
from mtp_kernels.decoder.rows import ROWS, copy, norm_rows, panels_of, project
from mtp_kernels.decoder.weights import Layer


@inner
def layer_at(table: Any, index: Any) -> Any:
    row = table[index]
    return Layer(
        row[0], row[1], row[2], row[3], row[4], row[5], row[6], row[7],
        row[8], row[9], row[10], row[11], row[12], row[13], row[14], row[15],
    )  # fmt: skip


@compiled
def run_layers(
    member: Any, table: Any, sizes: Any, batch: Any, caches: Any, scratch: Any, x: Any
) -> None:
    """The stream x [T, d] through all layers, in place; caches [layers, slots, c+r]."""
    for index in range(table.shape[0]):
        layer = layer_at(table, index)
        attention(member, layer, sizes, batch, caches[index], scratch, x)
        feed_forward(member, layer, sizes, scratch, x)


@compiled
def run_norm(member: Any, x: Any, weight: Any, eps: Any, out: Any) -> None:
    """RMS norm of rows [T, d]."""
    first, last = share(member, x.shape[0])
    norm_rows(x[first:last], weight, eps, out[first:last])


@compiled
def run_project(member: Any, x: Any, weight: Any, out: Any) -> None:
    """out [T, n] = x [T, d] times packed panels [n / 32, d, 32], by panels."""
    depth, columns = x.shape[1], out.shape[1]
    made = np.empty((ROWS, PANEL), np.float32)
    first, last = share(member, panels_of(columns))
    for panel in range(first, last):
        size = min(PANEL, columns - panel * PANEL)
        at = address(weight) + 4 * panel * depth * PANEL
        for row in range(0, x.shape[0], ROWS):
            rows = min(ROWS, x.shape[0] - row)
            project(address(x[row]), depth, rows, at, depth, (0, 1), address(made), PANEL)
            for r in range(rows):
                start = panel * PANEL
                copy(made[r], out[row + r, start : start + size])
