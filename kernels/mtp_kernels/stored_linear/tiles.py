"""Compiled loops of the CPU backend: tiles of a stored weight, expanded and multiplied in cache."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from mtp_kernels.cpu.jit import compiled, inner
from mtp_kernels.cpu.team import share
from mtp_kernels.cpu.vectors import Rows, address, dot_rows
from mtp_kernels.quantize.cpu_numbers import from_bf16, from_e4m3
from mtp_kernels.quantize.layouts import BLOCK

TILE = 16  # rows of the weight that are float32 at a time
WIDTH = 512  # and their columns: 32 KB, a multiple of every group and block
PANEL = 64  # rows of the weight over which rows of x stay in the second-level cache
TOKENS = 256  # rows of x that meet a panel
# Forms of a weight. They are told apart when it is multiplied, not when that is compiled: most
# models have two of them.
BF16, FP8_BLOCKS, FP8_CHANNELS, INT8_CHANNELS, INT4_GROUPS = range(5)
# Numbers that turn a nibble into its code plus 8.
OFFSET, SIGNED = np.uint8(0), np.uint8(8)
NO_SCALE = np.empty((0, 0), np.float32)


class Stored(NamedTuple):
    """A weight [N, K] in one of the forms above.

    codes are the bytes of its rows; scale is [⌈N/128⌉, ⌈K/128⌉] of fp8 blocks, [N, 1] of channels,
    [N, K/g] of int4 groups. An int4's nibbles, the even column's low, xor flip are the codes + 8.
    """

    form: int
    codes: Any  # [N, bytes] uint8
    scale: Any  # float32
    flip: Any = OFFSET


@inner
def _expand(weight: Any, row: Any, start: Any, out: Any) -> None:
    """Write the weights of a row from column `start` on."""
    if weight.form == BF16:
        _expand_bf16(weight.codes[row].view(np.uint16)[start : start + out.size], out)
    elif weight.form == FP8_BLOCKS:
        for first in range(0, out.size, BLOCK):
            part, scale = out[first : first + BLOCK], weight.scale[row // BLOCK]
            at = start + first
            _expand_fp8(weight.codes[row, at : at + part.size], scale[at // BLOCK], part)
    elif weight.form == FP8_CHANNELS:
        _expand_fp8(weight.codes[row, start : start + out.size], weight.scale[row, 0], out)
    elif weight.form == INT8_CHANNELS:
        _expand_int8(weight.codes[row, start : start + out.size], weight.scale[row, 0], out)
    else:
        size = 2 * weight.codes.shape[1] // weight.scale.shape[1]
        for first in range(0, out.size, size):
            part, scale = out[first : first + size], weight.scale[row, (start + first) // size]
            at = (start + first) // 2
            _expand_int4(weight.codes[row, at : at + part.size // 2], scale, weight.flip, part)


@inner
def _expand_bf16(codes: Any, out: Any) -> None:
    for k in range(out.size):
        out[k] = from_bf16(codes[k])


@inner
def _expand_fp8(codes: Any, scale: Any, out: Any) -> None:
    for k in range(out.size):
        out[k] = from_e4m3(codes[k]) * scale


@inner
def _expand_int8(codes: Any, scale: Any, out: Any) -> None:
    for k in range(out.size):
        out[k] = np.float32(np.int32(codes[k]) - np.int32(128)) * scale


@inner
def _expand_int4(codes: Any, scale: Any, flip: Any, out: Any) -> None:
    for k in range(codes.size):
        low = np.uint8(codes[k] & np.uint8(15)) ^ flip
        high = np.uint8(codes[k] >> np.uint8(4)) ^ flip
        out[2 * k] = np.float32(np.int32(low) - np.int32(8)) * scale
        out[2 * k + 1] = np.float32(np.int32(high) - np.int32(8)) * scale


@compiled
def multiply(member: Any, x: Any, weight: Any, y: Any) -> None:
    """Add weight @ x.T to y [N, T], which is 0: the member's panels of the weight."""
    tile = np.empty((TILE, WIDTH), np.float32)
    sums = np.empty((TILE, TOKENS), np.float32)
    rows, count = y.shape
    first, last = share(member, (rows + PANEL - 1) // PANEL)
    for panel in range(first, last):
        end = min(rows, (panel + 1) * PANEL)
        for token in range(0, count, TOKENS):
            tokens = min(TOKENS, count - token)
            for start in range(0, x.shape[1], WIDTH):
                width = min(WIDTH, x.shape[1] - start)
                inputs = Rows(address(x[token:, start:]), x.shape[1], tokens)
                for row in range(panel * PANEL, end, TILE):
                    size = min(TILE, end - row)
                    for r in range(size):
                        _expand(weight, row + r, start, tile[r, :width])
                    expanded = Rows(address(tile), WIDTH, size)
                    dot_rows(expanded, inputs, width, address(sums), TOKENS)
                    for r in range(size):
                        out = y[row + r, token : token + tokens]
                        for t in range(tokens):
                            out[t] += sums[r, t]
