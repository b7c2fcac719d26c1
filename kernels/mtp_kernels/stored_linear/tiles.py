"""Compiled loops of the CPU backend: tiles of a stored weight, expanded and multiplied in cache."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba.extending import overload

from mtp_kernels.cpu.jit import compiled
from mtp_kernels.cpu.team import share
from mtp_kernels.cpu.vectors import Rows, address, dot_rows
from mtp_kernels.quantize.cpu_numbers import from_bf16, from_e4m3
from mtp_kernels.quantize.layouts import BLOCK

TILE = 16  # rows of the weight that are float32 at a time
WIDTH = 512  # and their columns: 32 KB, a multiple of every group and block
PANEL = 64  # rows of the weight over which rows of x stay in the second-level cache
TOKENS = 256  # rows of x that meet a panel
# Numbers that turn a nibble into its code plus 8.
OFFSET, SIGNED = np.uint8(0), np.uint8(8)


class Fp8Blocks(NamedTuple):
    """e4m3 bits [N, K], scale [⌈N/128⌉, ⌈K/128⌉]."""

    codes: Any
    scale: Any


class Fp8Channels(NamedTuple):
    """e4m3 bits [N, K], scale [N, 1]."""

    codes: Any
    scale: Any


class Int8Channels(NamedTuple):
    """Codes + 128 [N, K], scale [N, 1]."""

    codes: Any
    scale: Any


class Int4Groups(NamedTuple):
    """Pairs of nibbles [N, K/2], the even column's low, scale [N, K/g]; a nibble xor flip is the
    code + 8."""

    codes: Any
    scale: Any
    flip: Any


class Bf16(NamedTuple):
    """bf16 bits [N, K]."""

    codes: Any


def _expand(weight: Any, row: Any, start: Any, out: Any) -> None:
    """Write the weights of a row from column `start` on; compiled by the overload below."""
    raise NotImplementedError


@overload(_expand)
def _expand_overload(weight: Any, row: Any, start: Any, out: Any) -> Any:
    def fp8_blocks(weight: Any, row: Any, start: Any, out: Any) -> None:
        for first in range(0, out.size, BLOCK):
            at = start + first
            part = out[first : first + BLOCK]
            codes = weight.codes[row, at : at + part.size]
            scale = weight.scale[row // BLOCK, at // BLOCK]
            for k in range(part.size):
                part[k] = from_e4m3(codes[k]) * scale

    def fp8_channels(weight: Any, row: Any, start: Any, out: Any) -> None:
        codes, scale = weight.codes[row, start : start + out.size], weight.scale[row, 0]
        for k in range(out.size):
            out[k] = from_e4m3(codes[k]) * scale

    def int8_channels(weight: Any, row: Any, start: Any, out: Any) -> None:
        codes, scale = weight.codes[row, start : start + out.size], weight.scale[row, 0]
        for k in range(out.size):
            out[k] = np.float32(np.int32(codes[k]) - np.int32(128)) * scale

    def int4_groups(weight: Any, row: Any, start: Any, out: Any) -> None:
        size = 2 * weight.codes.shape[1] // weight.scale.shape[1]
        for first in range(0, out.size, size):
            at = start + first
            part = out[first : first + size]
            codes = weight.codes[row, at // 2 : (at + part.size) // 2]
            scale = weight.scale[row, at // size]
            for k in range(codes.size):
                low = np.uint8(codes[k] & np.uint8(15)) ^ weight.flip
                high = np.uint8(codes[k] >> np.uint8(4)) ^ weight.flip
                part[2 * k] = np.float32(np.int32(low) - np.int32(8)) * scale
                part[2 * k + 1] = np.float32(np.int32(high) - np.int32(8)) * scale

    def bf16(weight: Any, row: Any, start: Any, out: Any) -> None:
        codes = weight.codes[row, start : start + out.size]
        for k in range(out.size):
            out[k] = from_bf16(codes[k])

    return {
        Fp8Blocks: fp8_blocks,
        Fp8Channels: fp8_channels,
        Int8Channels: int8_channels,
        Int4Groups: int4_groups,
        Bf16: bf16,
    }[weight.instance_class]


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
