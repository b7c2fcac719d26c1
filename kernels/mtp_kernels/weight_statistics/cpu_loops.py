"""Compiled loops of the CPU backend.

Sums of floats run in lanes, one of each column of a segment, so that LLVM makes vector code of them
without reordering anything; sums of integers need no lanes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from mtp_kernels.cpu.jit import compiled, inner
from mtp_kernels.quantize.cpu_numbers import float_of, from_bf16, from_e4m3
from mtp_kernels.quantize.layouts import BLOCK, GROUP_SIZES, LANES

_WIDTH = 512  # lanes of a row: LLVM's loops take 256 bytes at a time
_SEGMENT = 4096  # integer codes whose squares an int32 can add up
_F16_SHIFT = np.uint32(112 << 23)  # between the exponent biases of fp32 and f16
_F16_ROUNDER = np.float32(0.5)  # its spacing is 2**-24, the smallest f16 subnormal
_F16_ROUNDER_BITS = np.uint32(0x3F000000)
_F16_NORMAL, _F16_INFINITE = np.uint32(0x400), np.uint32(0x7C00)
_INFINITE_BITS = np.uint32(0x7F800000)
_LARGEST = np.float32(np.inf)


@inner
def _from_f16(code: Any) -> Any:
    """Return an f16 as fp32; NaN and infinite ones as infinite."""
    bits = np.uint32(np.uint16(code))
    magnitude = np.uint32(bits & np.uint32(0x7FFF))
    sign = np.uint32(np.uint32(bits & np.uint32(0x8000)) << np.uint32(16))
    normal = np.uint32(np.uint32(magnitude << np.uint32(13)) + _F16_SHIFT)
    subnormal = float_of(np.uint32(magnitude + _F16_ROUNDER_BITS)) - _F16_ROUNDER
    found = normal if magnitude >= _F16_NORMAL else np.float32(subnormal).view(np.uint32)
    found = _INFINITE_BITS if magnitude >= _F16_INFINITE else found
    return float_of(np.uint32(found | sign))


def _widened(values: Any, out: Any) -> None:
    """Convert a segment to fp32; compiled by the overload below, per dtype."""
    raise NotImplementedError


@overload(_widened)
def _widened_overload(values: Any, out: Any) -> Any:
    def from_bf16s(values: Any, out: Any) -> None:
        for k in range(values.size):
            out[k] = from_bf16(values[k])

    def from_f16s(values: Any, out: Any) -> None:
        for k in range(values.size):
            out[k] = _from_f16(values[k])

    def from_floats(values: Any, out: Any) -> None:
        for k in range(values.size):
            out[k] = values[k]

    kinds = {types.uint16: from_bf16s, types.int16: from_f16s, types.float32: from_floats}
    return kinds[values.dtype]


@inner
def _add_squares(values: Any, lanes: Any) -> None:
    for k in range(values.size):
        lanes[k] += np.float64(values[k]) * np.float64(values[k])


@inner
def _add_extremes(values: Any, lows: Any, highs: Any) -> None:
    for k in range(values.size):
        value = values[k]
        lows[k] = value if value < lows[k] else lows[k]
        highs[k] = value if value > highs[k] else highs[k]


@compiled
def float_group(values: Any) -> Any:
    """Return the smallest and the largest value and the sum of squares."""
    widened, lanes = np.empty(LANES, np.float32), np.zeros(LANES)
    lows, highs = np.full(LANES, _LARGEST), np.full(LANES, -_LARGEST)
    for first in range(0, values.size, LANES):
        segment = values[first : first + LANES]
        part = widened[: segment.size]
        _widened(segment, part)
        _add_squares(part, lanes)
        _add_extremes(part, lows, highs)
    return lows.min(), highs.max(), lanes.sum()


@inner
def _ordered(code: Any) -> Any:
    """Return an e4m3 code as an int8 that is ordered as the values are, or the reverse."""
    signed = np.int8(code)
    return np.int8(signed ^ np.int8(np.int8(signed >> np.int8(7)) & np.int8(0x7F)))


@inner
def _add_fp8(codes: Any, lanes: Any, lows: Any, highs: Any) -> None:
    for k in range(codes.size):
        magnitude = from_e4m3(np.uint8(codes[k] & np.uint8(0x7F)))
        lanes[k] += magnitude * magnitude
    for k in range(codes.size):
        place = _ordered(codes[k])
        lows[k] = min(lows[k], place)
        highs[k] = max(highs[k], place)


@inner
def _value_at(place: Any) -> Any:
    return from_e4m3(np.uint8(_ordered(np.uint8(place))))


@compiled
def fp8_groups(codes: Any, rows: Any, columns: Any, low: Any, high: Any, square_sum: Any) -> None:
    """Statistics of groups of `rows` rows and `columns` columns, BLOCK or all of them.

    Blocks have a lane for each column, a row by itself has some for all of its segments.
    """
    width = codes.shape[1] if columns == BLOCK else min(codes.shape[1], _WIDTH)
    lanes = np.empty(width, np.float32)
    lows, highs = np.empty(width, np.int8), np.empty(width, np.int8)
    for group_row in range(low.shape[0]):
        lanes[:] = np.float32(0)
        lows[:] = np.int8(127)
        highs[:] = np.int8(-128)
        for row in range(group_row * rows, min((group_row + 1) * rows, codes.shape[0])):
            for first in range(0, codes.shape[1], width):
                _add_fp8(codes[row, first : first + width], lanes, lows, highs)
        for group in range(low.shape[1]):
            own = slice(group * columns, (group + 1) * columns)
            low[group_row, group] = _value_at(lows[own].min())
            high[group_row, group] = _value_at(highs[own].max())
            total = 0.0
            for lane in lanes[own]:
                total += np.float64(lane)
            square_sum[group_row, group] = total


@inner
def _int8_segment(codes: Any) -> Any:
    low, high = np.int32(127), np.int32(-128)
    squares, outer = np.int32(0), np.int32(0)
    for k in range(codes.size):
        code = np.int32(np.int32(codes[k]) - np.int32(128))
        squares = np.int32(squares + np.int32(code * code))
        outer = np.int32(outer + np.int32(abs(code) >= np.int32(64)))
        low, high = min(low, code), max(high, code)
    return low, high, squares, outer


@compiled
def int8_groups(codes: Any, low: Any, high: Any, square_sum: Any) -> Any:
    """Statistics of each row of codes + 128; returns the number of outer codes."""
    every = 0
    for row in range(codes.shape[0]):
        smallest, largest, total = np.int32(127), np.int32(-128), 0
        for first in range(0, codes.shape[1], _SEGMENT):
            found = _int8_segment(codes[row, first : first + _SEGMENT])
            smallest, largest = min(smallest, found[0]), max(largest, found[1])
            total += found[2]
            every += found[3]
        low[row, 0], high[row, 0], square_sum[row, 0] = smallest, largest, total
    return every


def _int4_group(size: int) -> Any:
    """Statistics of a group of `size` bytes: LLVM makes vector code of so short a loop only where
    its length is constant."""

    def measure(pairs: Any, flipped: Any) -> Any:
        low, high = np.int16(7), np.int16(-8)
        squares, outer = np.int16(0), np.int16(0)
        for k in range(size):
            pair = np.uint8(pairs[k] ^ flipped)
            even = np.int16(np.int16(pair & np.uint8(15)) - np.int16(8))
            odd = np.int16(np.int16(pair >> np.uint8(4)) - np.int16(8))
            squares = np.int16(squares + np.int16(np.int16(even * even) + np.int16(odd * odd)))
            outer = np.int16(outer + np.int16(abs(even) > np.int16(4)))
            outer = np.int16(outer + np.int16(abs(odd) > np.int16(4)))
            low, high = min(low, min(even, odd)), max(high, max(even, odd))
        return low, high, squares, outer

    return inner(measure)


_INT4_OF_32, _INT4_OF_64, _INT4_OF_128 = (_int4_group(size // 2) for size in GROUP_SIZES)


@compiled
def int4_groups(pairs: Any, flipped: Any, low: Any, high: Any, square_sum: Any) -> Any:
    """Statistics of each group of nibbles code + 8; returns the number of outer codes.

    `flipped` are the bits of a byte by which its nibbles differ from that.
    """
    every = 0
    size = pairs.shape[1] // low.shape[1]
    for row in range(pairs.shape[0]):
        for group in range(low.shape[1]):
            codes = pairs[row, group * size : (group + 1) * size]
            if size == 64:
                found = _INT4_OF_128(codes, flipped)
            elif size == 32:
                found = _INT4_OF_64(codes, flipped)
            else:
                found = _INT4_OF_32(codes, flipped)
            low[row, group], high[row, group], square_sum[row, group] = found[:3]
            every += found[3]
    return every


@inner
def _add_errors(wanted: Any, found: Any, signal: Any, noise: Any, largest: Any) -> None:
    for k in range(wanted.size):
        value = np.float64(wanted[k])
        error = np.float64(found[k]) - value
        signal[k] += value * value
        noise[k] += error * error
        size = abs(error)
        largest[k] = size if size > largest[k] else largest[k]


@compiled
def difference(wanted: Any, found: Any) -> Any:
    """Return the sums of squares of the wanted values and of the errors, and the largest error."""
    signal, noise, largest = np.zeros(LANES), np.zeros(LANES), np.zeros(LANES)
    for first in range(0, wanted.size, LANES):
        _add_errors(
            wanted[first : first + LANES], found[first : first + LANES], signal, noise, largest
        )
    return signal.sum(), noise.sum(), largest.max()
