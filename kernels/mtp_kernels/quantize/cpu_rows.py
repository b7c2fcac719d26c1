"""The compiled loops of the CPU backend.

Bits are moved with integer operations, never with table look-ups or branches, so that LLVM turns
every loop into vector code; fastmath stays off and nothing is contracted, so that the vector code
computes what the reference computes. Rounding to integers adds and subtracts 1.5 * 2**23, where
the spacing of fp32 is 1: to nearest, ties to even. numba widens sums of uint32 to 64 bits, which
halves the vectors, hence the casts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import overload

# The numbers of layouts.py, written out: numba's cache on disk knows changes of this file only, and
# would go on serving a number imported from another one.
BLOCK = 128
LANES = 128
E4M3_MAX = np.float32(448.0)
INT8_MAX = np.float32(127.0)
INT4_MIN, INT4_MAX = np.float32(-8.0), np.float32(7.0)
INT4_HALF_RANGE = np.float32(7.5)
SCALE_FLOOR = np.float32(2.0**-126)
ZERO_SCALE = np.float32(1.0)

ROUNDER = np.float32(1.5 * 2.0**23)
E4M3_ROUNDER = np.float32(2.0**14)  # its spacing is 2**-9, the smallest e4m3 subnormal
E4M3_ROUNDER_BITS = np.uint32(0x46800000)
E4M3_MAX_BITS = np.uint32(0x43E00000)
E4M3_NORMAL_BITS = np.uint32(0x3C800000)  # 2**-6
EXPONENT_SHIFT = np.uint32(120 << 23)  # between the exponent biases of fp32 and e4m3
MAGNITUDE = np.uint32(0x7FFFFFFF)
NAN_BITS = np.uint32(0x7FC00000)


@njit(cache=True, nogil=True)
def _bits(value: Any) -> Any:
    return np.float32(value).view(np.uint32)


@njit(cache=True, nogil=True)
def _float(bits: Any) -> Any:
    return np.uint32(bits).view(np.float32)


@njit(cache=True, nogil=True)
def _magnitude(value: Any) -> Any:
    return np.uint32(_bits(value) & MAGNITUDE)


@njit(cache=True, nogil=True)
def _to_bf16(value: Any) -> Any:
    bits = _bits(value)
    odd = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
    return np.uint16(np.uint32(bits + np.uint32(odd + np.uint32(0x7FFF))) >> np.uint32(16))


@njit(cache=True, nogil=True)
def _from_bf16(bits: Any) -> Any:
    return _float(np.uint32(np.uint32(bits) << np.uint32(16)))


@njit(cache=True, nogil=True)
def _from_e4m3(code: Any) -> Any:
    magnitude = np.uint32(np.uint32(code) & np.uint32(0x7F))
    sign = np.uint32(np.uint32(np.uint32(code) & np.uint32(0x80)) << np.uint32(24))
    normal = np.uint32(np.uint32(magnitude << np.uint32(20)) + EXPONENT_SHIFT)
    subnormal = _bits(_float(np.uint32(magnitude + E4M3_ROUNDER_BITS)) - E4M3_ROUNDER)
    bits = NAN_BITS if magnitude == np.uint32(0x7F) else normal
    bits = subnormal if magnitude < np.uint32(8) else bits
    return _float(np.uint32(bits | sign))


@njit(cache=True, nogil=True)
def _to_e4m3(value: Any) -> Any:
    sign = np.uint32(np.uint32(_bits(value) >> np.uint32(24)) & np.uint32(0x80))
    magnitude = min(_magnitude(value), E4M3_MAX_BITS)
    odd = np.uint32(np.uint32(magnitude >> np.uint32(20)) & np.uint32(1))
    rounded = np.uint32(np.uint32(magnitude - EXPONENT_SHIFT) + np.uint32(odd + np.uint32(0x7FFFF)))
    subnormal = np.uint32(_bits(_float(magnitude) + E4M3_ROUNDER) - E4M3_ROUNDER_BITS)
    normal = np.uint32(rounded >> np.uint32(20))
    code = subnormal if magnitude < E4M3_NORMAL_BITS else normal
    return np.uint8(np.uint32(code | sign))


def _load_row(source: Any, block_scale: Any, row: Any, weights: Any) -> None:
    """The fp32 weights of one row; compiled by the overload below, one way a source dtype."""
    raise NotImplementedError


@overload(_load_row)
def _load_row_overload(source: Any, block_scale: Any, row: Any, weights: Any) -> Any:
    def load_fp8(source: Any, block_scale: Any, row: Any, weights: Any) -> None:
        for block in range(block_scale.shape[1]):
            codes = source[row, block * BLOCK : (block + 1) * BLOCK]
            part = weights[block * BLOCK : (block + 1) * BLOCK]
            scale = block_scale[row // BLOCK, block]
            for k in range(codes.size):
                part[k] = _from_e4m3(codes[k]) * scale

    def load_bf16(source: Any, block_scale: Any, row: Any, weights: Any) -> None:
        values = source[row]
        for k in range(values.size):
            weights[k] = _from_bf16(values[k])

    def load_fp32(source: Any, block_scale: Any, row: Any, weights: Any) -> None:
        weights[:] = source[row]

    return {types.uint8: load_fp8, types.uint16: load_bf16, types.float32: load_fp32}[source.dtype]


def _store_row(weights: Any, out: Any, restored: Any) -> None:
    """One row to its output dtype, and what that stores; compiled by the overload below."""
    raise NotImplementedError


@overload(_store_row)
def _store_row_overload(weights: Any, out: Any, restored: Any) -> Any:
    def store_bf16(weights: Any, out: Any, restored: Any) -> None:
        for k in range(weights.size):
            bits = _to_bf16(weights[k])
            out[k] = bits
            restored[k] = _from_bf16(bits)

    def store_fp32(weights: Any, out: Any, restored: Any) -> None:
        out[:] = weights
        restored[:] = weights

    return {types.uint16: store_bf16, types.float32: store_fp32}[out.dtype]


@njit(cache=True, nogil=True)
def _amax(weights: Any) -> Any:
    largest = np.uint32(0)  # non-negative floats are ordered as their bits
    for k in range(weights.size):
        largest = max(largest, _magnitude(weights[k]))
    return _float(largest)


@njit(cache=True, nogil=True)
def _scale(amax: Any, divisor: Any, factor: Any) -> Any:
    if amax == np.float32(0):
        return ZERO_SCALE
    return max(np.float32(np.float32(amax / divisor) * factor), SCALE_FLOOR)


@njit(cache=True, nogil=True)
def _bf16_scale(amax: Any, divisor: Any, factor: Any) -> Any:
    return _from_bf16(_to_bf16(_scale(amax, divisor, factor)))


@njit(cache=True, nogil=True)
def _halve(lanes: Any) -> Any:
    half = lanes.size // 2
    while half > 0:
        lower = lanes[:half]
        upper = lanes[half : 2 * half]
        for lane in range(half):
            lower[lane] = lower[lane] + upper[lane]
        half //= 2
    return lanes[0]


@njit(cache=True, nogil=True)
def _sum_lanes(lanes: Any) -> Any:
    """_halve of LANES numbers, its loops of known length: a short row ends in half the time."""
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


@njit(cache=True, nogil=True)
def _row_stats(weights: Any, restored: Any, lanes: Any, errors: Any, row: Any, stats: Any) -> None:
    signal, error, max_error = stats
    lanes[:] = 0.0
    errors[:] = 0.0
    largest = np.uint32(0)
    for start in range(0, weights.size, LANES):
        stored = weights[start : start + LANES]
        kept = restored[start : start + LANES]
        for lane in range(stored.size):
            difference = np.float32(stored[lane] - kept[lane])
            lanes[lane] += np.float64(stored[lane]) * np.float64(stored[lane])
            errors[lane] += np.float64(difference) * np.float64(difference)
            largest = max(largest, _magnitude(difference))
    signal[row] = _sum_lanes(lanes)
    error[row] = _sum_lanes(errors)
    max_error[row] = _float(largest)


@njit(cache=True, nogil=True)
def dequantize_fp8_block(
    codes: Any, block_scale: Any, out: Any, signal: Any, error: Any, max_error: Any
) -> None:
    weights = np.empty(codes.shape[1], np.float32)
    restored = np.empty_like(weights)
    lanes, errors = np.empty(LANES), np.empty(LANES)
    for row in range(codes.shape[0]):
        _load_row(codes, block_scale, row, weights)
        _store_row(weights, out[row], restored)
        _row_stats(weights, restored, lanes, errors, row, (signal, error, max_error))


@njit(cache=True, nogil=True)
def _block_scales(source: Any, none: Any, top: Any, power_of_two: Any, scale: Any) -> None:
    """The scales of the blocks whose first row is `top`."""
    weights = np.empty(source.shape[1], np.float32)
    largest = np.zeros(scale.size, np.float32)
    for row in range(top, min(top + BLOCK, source.shape[0])):
        _load_row(source, none, row, weights)
        for block in range(scale.size):
            amax = _amax(weights[block * BLOCK : (block + 1) * BLOCK])
            largest[block] = max(largest[block], amax)
    for block in range(scale.size):
        scale[block] = _scale(largest[block], E4M3_MAX, np.float32(1))
        if power_of_two:
            scale[block] = _float(
                (_bits(scale[block]) + np.uint32(0x7FFFFF)) & ~np.uint32(0x7FFFFF)
            )


@njit(cache=True, nogil=True)
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
        _load_row(source, none, row, weights)
        for block in range(scale.shape[1]):
            out = codes[row, block * BLOCK : (block + 1) * BLOCK]
            part = weights[block * BLOCK : (block + 1) * BLOCK]
            kept = restored[block * BLOCK : (block + 1) * BLOCK]
            multiplier = scale[row // BLOCK, block]
            for k in range(out.size):
                code = _to_e4m3(part[k] / multiplier)
                out[k] = code
                kept[k] = _from_e4m3(code) * multiplier
        _row_stats(weights, restored, lanes, errors, row, (signal, error, max_error))


@njit(cache=True, nogil=True)
def quantize_int8_channel(
    source: Any,
    block_scale: Any,
    packed: Any,
    scale: Any,
    signal: Any,
    error: Any,
    max_error: Any,
) -> None:
    weights = np.empty(source.shape[1], np.float32)
    restored = np.empty_like(weights)
    lanes, errors = np.empty(LANES), np.empty(LANES)
    for row in range(source.shape[0]):
        _load_row(source, block_scale, row, weights)
        multiplier = _bf16_scale(_amax(weights), INT8_MAX, np.float32(1))
        scale[row, 0] = multiplier
        out = packed[row]
        for k in range(out.size):
            rounder = np.float32(weights[k] / multiplier) + ROUNDER
            out[k] = np.uint8(np.uint32(_bits(rounder) + np.uint32(128)))
            restored[k] = np.float32(rounder - ROUNDER) * multiplier
        _row_stats(weights, restored, lanes, errors, row, (signal, error, max_error))


@njit(cache=True, nogil=True)
def _int4_rounder(weight: Any, scale: Any) -> Any:
    """The int4 code of a weight plus ROUNDER: its low bits are the code's."""
    quotient = np.float32(weight / scale)
    quotient = quotient if quotient > INT4_MIN else INT4_MIN
    quotient = quotient if quotient < INT4_MAX else INT4_MAX
    return np.float32(quotient + ROUNDER)


@njit(cache=True, nogil=True)
def _group_error(group: Any, scale: Any, squares: Any) -> Any:
    for k in range(group.size):
        kept = np.float32(_int4_rounder(group[k], scale) - ROUNDER) * scale
        difference = np.float64(np.float32(group[k] - kept))
        squares[k] = difference * difference
    return _halve(squares)


@njit(cache=True, nogil=True)
def _best_scale(group: Any, first: Any, amax: Any, factors: Any, squares: Any) -> Any:
    """The first of the factors' scales with the least squared error; `first` is factors[0]'s."""
    best = first
    least = _group_error(group, best, squares)
    for index in range(1, factors.size):
        candidate = _bf16_scale(amax, INT4_HALF_RANGE, factors[index])
        error = _group_error(group, candidate, squares)
        if error < least:
            best, least = candidate, error
    return best


@njit(cache=True, nogil=True)
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
    restored = np.empty_like(weights)
    lanes, errors = np.empty(LANES), np.empty(LANES)
    squares = np.empty(group_size)
    nibbles = np.empty(source.shape[1], np.uint8)
    pairs = nibbles.view(np.uint16)
    for row in range(source.shape[0]):
        _load_row(source, block_scale, row, weights)
        for index in range(scale.shape[1]):
            group = weights[index * group_size : (index + 1) * group_size]
            kept = restored[index * group_size : (index + 1) * group_size]
            codes = nibbles[index * group_size : (index + 1) * group_size]
            amax = _amax(group)
            multiplier = _bf16_scale(amax, INT4_HALF_RANGE, factors[0])
            if factors.size > 1:
                multiplier = _best_scale(group, multiplier, amax, factors, squares)
            scale[row, index] = multiplier
            for k in range(group.size):
                rounder = _int4_rounder(group[k], multiplier)
                codes[k] = np.uint8(np.uint32(_bits(rounder) + np.uint32(8)) & np.uint32(15))
                kept[k] = np.float32(rounder - ROUNDER) * multiplier
        out = packed[row]
        for k in range(out.size):
            out[k] = np.uint8(pairs[k] | pairs[k] >> np.uint16(4))
        _row_stats(weights, restored, lanes, errors, row, (signal, error, max_error))


@njit(cache=True, nogil=True)
def dequantize_int8_channel(codes: Any, scale: Any, out: Any) -> None:
    weights = np.empty(codes.shape[1], np.float32)
    restored = np.empty_like(weights)
    for row in range(codes.shape[0]):
        values = codes[row]
        multiplier = scale[row, 0]
        for k in range(values.size):
            weights[k] = np.float32(np.int32(values[k]) - np.int32(128)) * multiplier
        _store_row(weights, out[row], restored)


@njit(cache=True, nogil=True)
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
        _store_row(weights, out[row], restored)
