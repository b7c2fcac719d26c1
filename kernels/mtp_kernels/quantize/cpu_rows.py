"""Compiled loops of the CPU backend, over rows that stay in cache."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from mtp_kernels.cpu.jit import compiled, inner
from mtp_kernels.quantize import layouts
from mtp_kernels.quantize.cpu_numbers import (
    ROUNDER,
    bf16_scale,
    bits_of,
    float_of,
    from_bf16,
    from_e4m3,
    from_f16,
    ideal_scale,
    largest,
    magnitude_bits,
    prefetch,
    to_bf16,
    to_e4m3,
    to_f16,
)
from mtp_kernels.quantize.layouts import BLOCK, LANES

E4M3_MAX = np.float32(layouts.E4M3_MAX)
INT8_MAX = np.float32(layouts.INT8_MAX)
INT4_MIN, INT4_MAX = np.float32(layouts.INT4_MIN), np.float32(layouts.INT4_MAX)
INT4_HALF_RANGE = np.float32(layouts.INT4_HALF_RANGE)


def load_row(source: Any, block_scale: Any, row: Any, weights: Any) -> None:
    """Return the fp32 weights of one row; compiled by the overload below, per source dtype."""
    raise NotImplementedError


@overload(load_row)
def _load_row_overload(source: Any, block_scale: Any, row: Any, weights: Any) -> Any:
    def load_fp8(source: Any, block_scale: Any, row: Any, weights: Any) -> None:
        for block in range(block_scale.shape[1]):
            codes = source[row, block * BLOCK : (block + 1) * BLOCK]
            part = weights[block * BLOCK : (block + 1) * BLOCK]
            scale = block_scale[row // BLOCK, block]
            for k in range(codes.size):
                part[k] = from_e4m3(codes[k]) * scale

    def load_bf16(source: Any, block_scale: Any, row: Any, weights: Any) -> None:
        values = source[row]
        for k in range(values.size):
            weights[k] = from_bf16(values[k])

    def load_fp32(source: Any, block_scale: Any, row: Any, weights: Any) -> None:
        values = source[row]
        for k in range(values.size):  # an assignment of slices would be compiled to broadcast
            weights[k] = values[k]

    return {types.uint8: load_fp8, types.uint16: load_bf16, types.float32: load_fp32}[source.dtype]


def store_row(weights: Any, out: Any, restored: Any) -> None:
    """Convert one row to its output dtype, and back; compiled by the overload below."""
    raise NotImplementedError


@overload(store_row)
def _store_row_overload(weights: Any, out: Any, restored: Any) -> Any:
    def store_bf16(weights: Any, out: Any, restored: Any) -> None:
        for k in range(weights.size):
            bits = to_bf16(weights[k])
            out[k] = bits
            restored[k] = from_bf16(bits)

    def store_fp16(weights: Any, out: Any, restored: Any) -> None:
        for k in range(weights.size):
            bits = to_f16(weights[k])
            out[k] = bits
            restored[k] = from_f16(bits)

    def store_fp32(weights: Any, out: Any, restored: Any) -> None:
        for k in range(weights.size):
            out[k] = weights[k]
            restored[k] = weights[k]

    stores = {types.uint16: store_bf16, types.int16: store_fp16, types.float32: store_fp32}
    return stores[out.dtype]


@inner
def halve(lanes: Any) -> Any:
    """Return the sum of lanes, a power of two, in the order of RowStats."""
    half = lanes.size // 2
    while half > 0:
        lower = lanes[:half]
        upper = lanes[half : 2 * half]
        for lane in range(half):
            lower[lane] = lower[lane] + upper[lane]
        half //= 2
    return lanes[0]


@inner
def _sum_lanes(lanes: Any) -> Any:
    """halve of LANES numbers, its loops of known length."""
    for lane in range(64):
        lanes[lane] += lanes[lane + 64]
    for lane in range(32):
        lanes[lane] += lanes[lane + 32]
    for lane in range(16):
        lanes[lane] += lanes[lane + 16]
    for lane in range(8):
        lanes[lane] += lanes[lane + 8]
    for lane in range(4):
        lanes[lane] += lanes[lane + 4]
    return (lanes[0] + lanes[2]) + (lanes[1] + lanes[3])


@inner
def add_errors(stored: Any, kept: Any, lanes: Any, errors: Any, biggest: Any) -> Any:
    """Add a segment's squares to each lane's sums; return the bits of the largest error so far."""
    for lane in range(stored.size):
        difference = np.float32(stored[lane] - kept[lane])
        lanes[lane] += np.float64(stored[lane]) * np.float64(stored[lane])
        errors[lane] += np.float64(difference) * np.float64(difference)
        biggest = max(biggest, magnitude_bits(difference))
    return biggest


@inner
def end_row(row: Any, lanes: Any, errors: Any, biggest: Any, stats: Any) -> None:
    """Sums of a row over its segments."""
    signal, error, max_error = stats
    signal[row] = _sum_lanes(lanes)
    error[row] = _sum_lanes(errors)
    max_error[row] = float_of(biggest)


@inner
def _row_stats(weights: Any, restored: Any, lanes: Any, errors: Any, row: Any, stats: Any) -> None:
    lanes[:] = 0.0
    errors[:] = 0.0
    biggest = np.uint32(0)
    for start in range(0, weights.size, LANES):
        stored = weights[start : start + LANES]
        biggest = add_errors(stored, restored[start : start + LANES], lanes, errors, biggest)
    end_row(row, lanes, errors, biggest, stats)


@compiled
def dequantize_fp8_block(
    codes: Any, block_scale: Any, out: Any, signal: Any, error: Any, max_error: Any
) -> None:
    weights = np.empty(codes.shape[1], np.float32)
    restored = np.empty_like(weights)
    lanes, errors = np.empty(LANES), np.empty(LANES)
    for row in range(codes.shape[0]):
        load_row(codes, block_scale, row, weights)
        store_row(weights, out[row], restored)
        _row_stats(weights, restored, lanes, errors, row, (signal, error, max_error))


@inner
def _block_scales(source: Any, none: Any, top: Any, power_of_two: Any, scale: Any) -> None:
    """Compute the scales of the blocks whose first row is `top`."""
    weights = np.empty(source.shape[1], np.float32)
    biggest = np.zeros(scale.size, np.float32)
    for row in range(top, min(top + BLOCK, source.shape[0])):
        load_row(source, none, row, weights)
        for block in range(scale.size):
            amax = largest(weights[block * BLOCK : (block + 1) * BLOCK])
            biggest[block] = max(biggest[block], amax)
    for block in range(scale.size):
        scale[block] = ideal_scale(biggest[block], E4M3_MAX, np.float32(1))
        if power_of_two:
            scale[block] = float_of(
                (bits_of(scale[block]) + np.uint32(0x7FFFFF)) & ~np.uint32(0x7FFFFF)
            )


@compiled
def quantize_fp8_block(
    source: Any,
    none: Any,
    power_of_two: Any,
    codes: Any,
    scale: Any,
    signal: Any,
    error: Any,
    max_error: Any,
) -> None:
    weights = np.empty(source.shape[1], np.float32)
    restored = np.empty_like(weights)
    lanes, errors = np.empty(LANES), np.empty(LANES)
    for row in range(source.shape[0]):
        if row % BLOCK == 0:
            _block_scales(source, none, row, power_of_two, scale[row // BLOCK])
        load_row(source, none, row, weights)
        for block in range(scale.shape[1]):
            out = codes[row, block * BLOCK : (block + 1) * BLOCK]
            part = weights[block * BLOCK : (block + 1) * BLOCK]
            kept = restored[block * BLOCK : (block + 1) * BLOCK]
            multiplier = scale[row // BLOCK, block]
            for k in range(out.size):
                code = to_e4m3(part[k] / multiplier)
                out[k] = code
                kept[k] = from_e4m3(code) * multiplier
        _row_stats(weights, restored, lanes, errors, row, (signal, error, max_error))


@compiled
def quantize_int8_channel(
    source: Any,
    block_scale: Any,
    packed: Any,
    scale: Any,
    signal: Any,
    error: Any,
    max_error: Any,
) -> None:
    weights, restored = np.empty(source.shape[1], np.float32), np.empty(LANES, np.float32)
    lanes, errors = np.empty(LANES), np.empty(LANES)
    for row in range(source.shape[0]):
        load_row(source, block_scale, row, weights)
        multiplier = bf16_scale(largest(weights), INT8_MAX, np.float32(1))
        scale[row, 0] = multiplier
        lanes[:] = 0.0
        errors[:] = 0.0
        biggest = np.uint32(0)
        for first in range(0, weights.size, LANES):
            prefetch(source, row + 1, first)
            segment = weights[first : first + LANES]
            out = packed[row, first : first + LANES]
            for k in range(out.size):
                rounder = np.float32(segment[k] / multiplier) + ROUNDER
                out[k] = np.uint8(np.uint32(bits_of(rounder) + np.uint32(128)))
                restored[k] = np.float32(rounder - ROUNDER) * multiplier
            biggest = add_errors(segment, restored, lanes, errors, biggest)
        end_row(row, lanes, errors, biggest, (signal, error, max_error))


@inner
def _int4_rounder(weight: Any, scale: Any) -> Any:
    """Return the int4 code of a weight plus ROUNDER: its low bits are the code's."""
    quotient = np.float32(weight / scale)
    quotient = quotient if quotient > INT4_MIN else INT4_MIN
    quotient = quotient if quotient < INT4_MAX else INT4_MAX
    return np.float32(quotient + ROUNDER)


@inner
def _group_error(group: Any, scale: Any, squares: Any) -> Any:
    for k in range(group.size):
        kept = np.float32(_int4_rounder(group[k], scale) - ROUNDER) * scale
        difference = np.float64(np.float32(group[k] - kept))
        squares[k] = difference * difference
    return halve(squares)


@inner
def _best_scale(group: Any, first: Any, amax: Any, factors: Any, squares: Any) -> Any:
    """Return the first factor's scale of least squared error; `first` is factors[0]'s."""
    best = first
    least = _group_error(group, best, squares)
    for index in range(1, factors.size):
        candidate = bf16_scale(amax, INT4_HALF_RANGE, factors[index])
        error = _group_error(group, candidate, squares)
        if error < least:
            best, least = candidate, error
    return best


@inner
def _int4_scales(weights: Any, group_size: Any, factors: Any, squares: Any, scale: Any) -> None:
    """Compute the scales of a row's groups."""
    for index in range(scale.size):
        scale[index] = largest(weights[index * group_size : (index + 1) * group_size])
    if factors.size == 1:
        for index in range(scale.size):
            scale[index] = bf16_scale(scale[index], INT4_HALF_RANGE, factors[0])
        return
    for index in range(scale.size):
        group = weights[index * group_size : (index + 1) * group_size]
        first = bf16_scale(scale[index], INT4_HALF_RANGE, factors[0])
        scale[index] = _best_scale(group, first, scale[index], factors, squares)


@inner
def _int4_codes(group: Any, scale: Any, codes: Any, kept: Any) -> None:
    for k in range(group.size):
        rounder = _int4_rounder(group[k], scale)
        codes[k] = np.uint8(np.uint32(bits_of(rounder) + np.uint32(8)) & np.uint32(15))
        kept[k] = np.float32(rounder - ROUNDER) * scale


@compiled
def quantize_int4_group(
    source: Any,
    block_scale: Any,
    group_size: Any,
    factors: Any,
    packed: Any,
    scale: Any,
    signal: Any,
    error: Any,
    max_error: Any,
) -> None:
    weights = np.empty(source.shape[1], np.float32)
    restored, nibbles = np.empty(LANES, np.float32), np.empty(LANES, np.uint8)
    lanes, errors = np.empty(LANES), np.empty(LANES)
    squares = np.empty(group_size)
    pairs = nibbles.view(np.uint16)
    for row in range(source.shape[0]):
        load_row(source, block_scale, row, weights)
        multipliers = scale[row]
        _int4_scales(weights, group_size, factors, squares, multipliers)
        lanes[:] = 0.0
        errors[:] = 0.0
        biggest = np.uint32(0)
        index = 0
        for first in range(0, weights.size, LANES):
            prefetch(source, row + 1, first)
            segment = weights[first : first + LANES]
            for start in range(0, segment.size, group_size):
                group = segment[start : start + group_size]
                _int4_codes(group, multipliers[index], nibbles[start:], restored[start:])
                index += 1
            out = packed[row, first // 2 : first // 2 + segment.size // 2]
            for k in range(out.size):
                out[k] = np.uint8(pairs[k] | pairs[k] >> np.uint16(4))
            biggest = add_errors(segment, restored, lanes, errors, biggest)
        end_row(row, lanes, errors, biggest, (signal, error, max_error))


@compiled
def dequantize_int8_channel(codes: Any, scale: Any, out: Any) -> None:
    weights = np.empty(codes.shape[1], np.float32)
    restored = np.empty_like(weights)
    for row in range(codes.shape[0]):
        values = codes[row]
        multiplier = scale[row, 0]
        for k in range(values.size):
            weights[k] = np.float32(np.int32(values[k]) - np.int32(128)) * multiplier
        store_row(weights, out[row], restored)


@compiled
def dequantize_int4_group(pairs: Any, scale: Any, out: Any) -> None:
    weights = np.empty(out.shape[1], np.float32)
    restored = np.empty_like(weights)
    group_bytes = pairs.shape[1] // scale.shape[1]
    for row in range(pairs.shape[0]):
        for index in range(scale.shape[1]):
            values = pairs[row, index * group_bytes : (index + 1) * group_bytes]
            part = weights[2 * index * group_bytes : 2 * (index + 1) * group_bytes]
            multiplier = scale[row, index]
            for k in range(values.size):
                low = np.int32(values[k] & np.uint8(15)) - np.int32(8)
                high = np.int32(values[k] >> np.uint8(4)) - np.int32(8)
                part[2 * k] = np.float32(low) * multiplier
                part[2 * k + 1] = np.float32(high) * multiplier
        store_row(weights, out[row], restored)
