"""Steps on blocks of rows that the halves of a layer share: norm, projection, rotation."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import carray

from mtp_kernels.cpu.jit import compiled, inner
from mtp_kernels.cpu.vectors import PANEL, address, dot_rows, floats, multiply

ROWS = 32  # rows that go through a weight together


@inner
def vector(at: Any, size: Any) -> Any:
    """The floats at an address as an array."""
    return carray(floats(at), (size,))


@inner
def copy(source: Any, out: Any) -> None:
    """The first entries of source to all of out."""
    for column in range(out.size):
        out[column] = source[column]


@inner
def norm_row(x: Any, weight: Any, eps: Any, out: Any) -> None:
    """RMS norm of one row: x / sqrt(mean(x^2) + eps) * weight."""
    at_out = address(out)
    dot_rows(address(x), 0, 1, address(x), 0, 1, x.size, at_out, 1)
    mean = out[0] / np.float32(x.size)
    factor = np.float32(1.0) / np.float32(math.sqrt(np.float32(mean + eps)))
    for column in range(x.size):
        out[column] = x[column] * factor * weight[column]


@inner
def norm_rows(x: Any, weight: Any, eps: Any, out: Any) -> None:
    """RMS norm of rows [s, d] into the first columns of out [>= s, >= d]."""
    for row in range(x.shape[0]):
        norm_row(x[row], weight, eps, out[row, : x.shape[1]])


@compiled
def panels_of(columns: Any) -> Any:
    return -(-columns // PANEL)


@inner
def project(
    x: Any, x_row: Any, rows: Any, weight: Any, depth: Any, panels: Any, out: Any, out_row: Any
) -> None:
    """Rows times panels [first, last) of a packed weight; out has room for whole panels."""
    for panel in range(panels[0], panels[1]):
        at = weight + 4 * panel * depth * PANEL
        multiply(x, x_row, rows, at, PANEL, depth, out + 4 * panel * PANEL, out_row, 0)


@inner
def rotate(x: Any, turn: Any, out: Any) -> None:
    """Turn neighbouring pairs of x [r] by complex factors turn [r], cosine and sine in turn."""
    for pair in range(0, x.size, 2):
        cosine, sine = turn[pair], turn[pair + 1]
        left, right = x[pair], x[pair + 1]
        out[pair] = left * cosine - right * sine
        out[pair + 1] = left * sine + right * cosine


@compiled
def turns(positions: Any, inverse: Any, amplitude: Any) -> Any:
    """Rotations [T, r] of positions [T]; inverse [r/2] in radians per position."""
    out = np.empty((positions.size, 2 * inverse.size), np.float32)
    for row in range(positions.size):
        for pair in range(inverse.size):
            angle = np.float32(np.float32(positions[row]) * inverse[pair])
            out[row, 2 * pair] = amplitude * np.float32(math.cos(np.float64(angle)))
            out[row, 2 * pair + 1] = amplitude * np.float32(math.sin(np.float64(angle)))
    return out
