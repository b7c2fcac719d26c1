"""Steps on blocks of rows that both halves of a layer take: norm, projection, rotation."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import carray
from numba.extending import register_jitable

from mtp_kernels.cpu.bf16_panels import multiply_pairs, pair_rows
from mtp_kernels.cpu.integer_panels import encode_rows, groups_in, multiply_codes
from mtp_kernels.cpu.jit import inner
from mtp_kernels.cpu.matrix_units import TILE, configure, release
from mtp_kernels.cpu.panel_forms import PANEL, Panel, panel_bytes, takes_bf16, takes_codes
from mtp_kernels.cpu.panels import goes_in_pairs, multiply_pair, multiply_panel
from mtp_kernels.cpu.vectors import (
    Rows,
    address,
    dot_row,
    first_rows,
    floats,
    from_row,
    integers,
)

BLOCK_ROWS = 32  # rows that go through a weight together
STRIP_PANELS = 16  # that a block is multiplied with before the next ones
STRIP = STRIP_PANELS * PANEL


@inner
def vector(at: Any, size: Any) -> Any:
    """Return the floats at an address as an array."""
    return carray(floats(at), (size,))


@inner
def copy(source: Any, out: Any) -> None:
    """Copy the first entries of source to all of out."""
    for column in range(out.size):
        out[column] = source[column]


@inner
def norm_row(x: Any, weight: Any, eps: Any, out: Any) -> None:
    """Write the RMS norm of one row: x / sqrt(mean(x^2) + eps) * weight."""
    dot_row(address(x), address(x), x.size, address(out))
    mean = out[0] / np.float32(x.size)
    factor = np.float32(1.0) / np.float32(math.sqrt(np.float32(mean + eps)))
    for column in range(x.size):
        out[column] = x[column] * factor * weight[column]


@inner
def norm_rows(x: Any, weight: Any, eps: Any, out: Any) -> None:
    """Write the RMS norm of the first columns of rows x [s, >= d] to those of out [>= s, >= d]."""
    for row in range(x.shape[0]):
        norm_row(x[row, : weight.size], weight, eps, out[row, : weight.size])


@inner
def norm_block(x: Any, first: Any, weight: Any, eps: Any, out: Any) -> Any:
    """Write the RMS norm of up to BLOCK_ROWS rows of x from `first` on; return them as Rows."""
    count = min(BLOCK_ROWS, x.shape[0] - first)
    norm_rows(x[first : first + count], weight, eps, out)
    return Rows(address(out), out.shape[1], count)


@inner
def block_of(x: Any, first: Any, last: Any) -> Any:
    """Return the first BLOCK_ROWS of rows [first, last), or as many as there are."""
    return first_rows(from_row(x, first), min(BLOCK_ROWS, last - first))


@register_jitable
def panels_of(columns: int) -> int:
    """Return the number of panels that hold a number of outputs."""
    return -(-columns // PANEL)


@inner
def panel_of(weight: Any, form: Any, panel: Any, depth: Any) -> Any:
    """Return a panel [depth, PANEL] of the packed weight at an address."""
    return Panel(weight + panel * panel_bytes(form, depth), depth, form)


@inner
def panel_in(stack: Any, number: Any, panel: Any, depth: Any) -> Any:
    """Return a panel of one of several matrices, given by the address of their table."""
    table = carray(integers(stack), (2 * (number + 1),))
    return panel_of(table[2 * number], table[2 * number + 1], panel, depth)


@inner
def project(x: Any, weight: Any, panels: Any, out: Any, out_stride: Any) -> None:
    """Multiply Rows x with panels [first, last) of a weight, given as its first panel.

    Every panel goes to its own columns of the rows at address `out`.
    """
    if takes_codes(weight.form):
        project_codes(x, weight, panels, out, out_stride)
        return
    if takes_bf16(weight.form):
        project_rounded(x, weight, panels, out, out_stride)
        return
    project_floats(x, weight, panels, out, out_stride)


@inner
def project_floats(x: Any, weight: Any, panels: Any, out: Any, out_stride: Any) -> None:
    """Project Rows x as they are."""
    panel, pairs = panels[0], goes_in_pairs(x, weight.form)
    while panel < panels[1]:
        own = panel_of(weight.at, weight.form, panel, weight.count)
        at = out + 4 * panel * PANEL
        if pairs and panel + 1 < panels[1]:
            following = panel_of(weight.at, weight.form, panel + 1, weight.count)
            multiply_pair(x, own, following.at, at, out_stride)
            panel += 2
        else:
            multiply_panel(x, own, at, out_stride)
            panel += 1


@inner
def project_rounded(x: Any, weight: Any, panels: Any, out: Any, out_stride: Any) -> None:
    """Project Rows x rounded to bf16."""
    pairs = np.empty((x.count, weight.count // 2), np.uint32)
    _project_pairs(x, weight, panels, pairs, out, out_stride)


@inner
def _project_pairs(x: Any, weight: Any, panels: Any, pairs: Any, out: Any, out_stride: Any) -> None:
    """Project rows as pairs in an array that the caller keeps, as _project_codes says."""
    paired = pair_rows(x, weight.form, pairs)
    if x.count >= TILE:
        configure()
    for panel in range(panels[0], panels[1]):
        own = panel_of(weight.at, weight.form, panel, weight.count)
        multiply_pairs(paired, own, out + 4 * panel * PANEL, out_stride)
    if x.count >= TILE:
        release()


@inner
def project_codes(x: Any, weight: Any, panels: Any, out: Any, out_stride: Any) -> None:
    """Project Rows x as codes of 8 bits."""
    groups = groups_in(weight.form, weight.count)
    codes = np.empty((x.count, weight.count), np.int8)
    scales, starts = np.empty((x.count, groups), np.float32), np.empty((x.count, groups), np.int32)
    _project_codes(x, weight, panels, (codes, scales, starts), out, out_stride)


@inner
def _project_codes(
    x: Any, weight: Any, panels: Any, arrays: Any, out: Any, out_stride: Any
) -> None:
    """Project rows as codes in arrays that the caller keeps for as long as this runs: its own would
    be freed after they are last named, which is before their addresses are last used."""
    codes, scales, starts = arrays
    encoded = encode_rows(x, weight, codes, scales, starts)
    if x.count >= TILE:
        configure()
    for panel in range(panels[0], panels[1]):
        own = panel_of(weight.at, weight.form, panel, weight.count)
        multiply_codes(encoded, own, out + 4 * panel * PANEL, out_stride)
    if x.count >= TILE:
        release()


@inner
def rotate(x: Any, cos_sin: Any, out: Any) -> None:
    """Rotate neighbouring pairs of x [r] by cos_sin [r], cosine and sine of each pair in turn."""
    for pair in range(0, x.size, 2):
        cos, sin = cos_sin[pair], cos_sin[pair + 1]
        even, odd = x[pair], x[pair + 1]
        out[pair] = even * cos - odd * sin
        out[pair + 1] = even * sin + odd * cos


@inner
def rotate_halves(x: Any, cos_sin: Any, out: Any) -> None:
    """Rotate the first entries of x [n] by cos_sin [r], pairs being entries of either half."""
    pairs = cos_sin.size // 2
    for pair in range(pairs):
        cos, sin = cos_sin[2 * pair], cos_sin[2 * pair + 1]
        first, second = x[pair], x[pair + pairs]
        out[pair] = first * cos - second * sin
        out[pair + pairs] = first * sin + second * cos
    for column in range(cos_sin.size, x.size):
        out[column] = x[column]


@inner
def cos_sin_of(positions: Any, rope: Any) -> Any:
    """Return cosines and sines [T, r] of positions [T], in turn, times the attention scaling."""
    inv_freq, scaling = rope
    out = np.empty((positions.size, 2 * inv_freq.size), np.float32)
    for row in range(positions.size):
        for pair in range(inv_freq.size):
            angle = np.float32(np.float32(positions[row]) * inv_freq[pair])
            out[row, 2 * pair] = scaling * np.float32(math.cos(np.float64(angle)))
            out[row, 2 * pair + 1] = scaling * np.float32(math.sin(np.float64(angle)))
    return out
