"""Compiled loops over rows of block floats; block_floats defines their bits."""

from __future__ import annotations

from typing import Any

import numpy as np

from mtp_kernels.cpu.jit import compiled, inner
from mtp_kernels.quantize import block_floats
from mtp_kernels.quantize.cpu_numbers import (
    bits_of,
    float_of,
    from_e4m3,
    largest,
    magnitude_bits,
    prefetch,
    to_e4m3,
)
from mtp_kernels.quantize.cpu_rows import add_errors, end_row, halve, load_row
from mtp_kernels.quantize.layouts import LANES

GROUP = block_floats.NVFP4_GROUP
_E2M1_MAX = np.float32(block_floats.E2M1_MAX)
_E2M1_MAX_BITS = np.uint32(0x40C00000)
_E2M1_NORMAL_BITS = np.uint32(0x3F800000)  # 1.0
_EXPONENT_SHIFT = np.uint32(126 << 23)  # between the exponent biases of fp32 and e2m1
_E2M1_ROUNDER = np.float32(2.0**22)  # its spacing is 0.5, the smallest e2m1 subnormal
_E2M1_ROUNDER_BITS = np.uint32(0x4A800000)
MX_GROUP = block_floats.MX_GROUP
_E8M0_BIAS, _E8M0_LAST = block_floats.E8M0_BIAS, block_floats.E8M0_LAST
# The largest numbers as mantissas from 1 to 2: 6 is 1.5 * 2**2, 448 is 1.75 * 2**8.
_E2M1_TOP_BITS, _E2M1_TOP_EXPONENT = np.uint32(0x400000), 2
_E4M3_TOP_BITS, _E4M3_TOP_EXPONENT = np.uint32(0x600000), 8
_UNDERFLOW = np.uint8(block_floats.UNDERFLOW)
_LAST_CODE = block_floats.E4M3_CODES[-1]
_FIRST_NORMAL, _OCTAVE = 8, 8  # e4m3 codes: twice the scale of a normal one is 8 codes further


@inner
def to_e2m1(value: Any) -> Any:
    magnitude = min(magnitude_bits(value), _E2M1_MAX_BITS)
    odd = np.uint32(np.uint32(magnitude >> np.uint32(22)) & np.uint32(1))
    rounded = np.uint32(
        np.uint32(magnitude - _EXPONENT_SHIFT) + np.uint32(odd + np.uint32(0x1FFFFF))
    )
    subnormal = np.uint32(bits_of(float_of(magnitude) + _E2M1_ROUNDER) - _E2M1_ROUNDER_BITS)
    code = subnormal if magnitude < _E2M1_NORMAL_BITS else np.uint32(rounded >> np.uint32(22))
    sign = np.uint32(np.uint32(bits_of(value) >> np.uint32(28)) & np.uint32(8))
    sign = sign if magnitude > np.uint32(0) else np.uint32(0)
    return np.uint32(code | sign)


@inner
def from_e2m1(code: Any) -> Any:
    magnitude = np.uint32(np.uint32(code) & np.uint32(7))
    sign = np.uint32(np.uint32(np.uint32(code) & np.uint32(8)) << np.uint32(28))
    normal = np.uint32(np.uint32(magnitude << np.uint32(22)) + _EXPONENT_SHIFT)
    subnormal = bits_of(float_of(np.uint32(magnitude + _E2M1_ROUNDER_BITS)) - _E2M1_ROUNDER)
    bits = subnormal if magnitude < np.uint32(2) else normal
    return float_of(np.uint32(bits | sign))


@inner
def _multiplier(code: Any, divisor: Any) -> Any:
    return np.float32(from_e4m3(code) / divisor)


@inner
def _block_error(block: Any, multiplier: Any, squares: Any) -> Any:
    for k in range(block.size):
        kept = np.float32(from_e2m1(to_e2m1(np.float32(block[k] / multiplier))) * multiplier)
        difference = np.float64(np.float32(block[k] - kept))
        squares[k] = difference * difference
    return halve(squares)


@inner
def _clipping(amax: Any, multiplier: Any) -> Any:
    """Return the square that clipping costs the largest number alone."""
    difference = np.float64(np.float32(amax - np.float32(_E2M1_MAX * multiplier)))
    return difference * difference


@inner
def _swept_scale(block: Any, amax: Any, divisor: Any, squares: Any) -> Any:
    """Return the scale of least squared error of all, having tried those that can have it.

    From the smallest scale that clips nothing, twice a scale never has a smaller error: its grid
    is a part of the other's. Below, clipping alone soon costs more than the best.
    """
    first: Any = max(np.int64(to_e4m3(np.float32(divisor * np.float32(amax / _E2M1_MAX)))), 1)
    while first > 1 and amax <= np.float32(_E2M1_MAX * _multiplier(first - 1, divisor)):
        first -= 1
    while first < _LAST_CODE and amax > np.float32(_E2M1_MAX * _multiplier(first, divisor)):
        first += 1
    best = first
    least = _block_error(block, _multiplier(first, divisor), squares)
    for code in range(first + 1, min(max(first, _FIRST_NORMAL) + _OCTAVE, _LAST_CODE + 1)):
        error = _block_error(block, _multiplier(code, divisor), squares)
        if error < least:
            best, least = code, error
    for code in range(first - 1, 0, -1):
        multiplier = _multiplier(code, divisor)
        if _clipping(amax, multiplier) > least:
            break
        error = _block_error(block, multiplier, squares)
        if error <= least:
            best, least = code, error
    return np.uint8(best)


@inner
def _scale_code(block: Any, divisor: Any, sweep: Any, squares: Any) -> Any:
    amax = largest(block)
    if sweep:
        return _swept_scale(block, amax, divisor, squares)
    code = to_e4m3(np.float32(np.float32(amax / _E2M1_MAX) * divisor))
    return _UNDERFLOW if code == 0 else code


@inner
def _block_codes(block: Any, multiplier: Any, codes: Any, kept: Any) -> None:
    for k in range(block.size):
        code = to_e2m1(np.float32(block[k] / multiplier))
        codes[k] = np.uint8(code)
        kept[k] = np.float32(from_e2m1(code) * multiplier)


@compiled
def quantize_nvfp4(
    source: Any,
    block_scale: Any,
    divisor: Any,
    sweep: Any,
    packed: Any,
    scale: Any,
    signal: Any,
    error: Any,
    max_error: Any,
) -> None:
    weights = np.empty(source.shape[1], np.float32)
    restored, nibbles = np.empty(LANES, np.float32), np.empty(LANES, np.uint8)
    lanes, errors = np.empty(LANES), np.empty(LANES)
    squares = np.empty(GROUP)
    pairs = nibbles.view(np.uint16)
    for row in range(source.shape[0]):
        load_row(source, block_scale, row, weights)
        lanes[:] = 0.0
        errors[:] = 0.0
        biggest = np.uint32(0)
        for first in range(0, weights.size, LANES):
            prefetch(source, row + 1, first)
            segment = weights[first : first + LANES]
            for start in range(0, segment.size, GROUP):
                block = segment[start : start + GROUP]
                code = _scale_code(block, divisor, sweep, squares)
                scale[row, (first + start) // GROUP] = code
                multiplier = _multiplier(code, divisor)
                _block_codes(block, multiplier, nibbles[start:], restored[start:])
            out = packed[row, first // 2 : first // 2 + segment.size // 2]
            for k in range(out.size):
                out[k] = np.uint8(pairs[k] | pairs[k] >> np.uint16(4))
            biggest = add_errors(segment, restored, lanes, errors, biggest)
        end_row(row, lanes, errors, biggest, (signal, error, max_error))


@inner
def _power_of_two(code: Any) -> Any:
    """Return the number of an exponent e8m0."""
    bits = np.uint32(np.uint32(code) << np.uint32(23))
    return float_of(bits if code > 0 else np.uint32(0x400000))


@inner
def _exponent(amax: Any, top_bits: Any, top_exponent: Any) -> Any:
    """Return the exponent e8m0 of the least power of two under which amax is no larger than a
    number with these mantissa bits and this exponent."""
    if amax == np.float32(0):
        return np.int64(_E8M0_BIAS)
    scaled, shift = amax, 0
    if bits_of(amax) < np.uint32(0x800000):  # a subnormal number
        scaled, shift = np.float32(amax * np.float32(2.0**24)), 24
    bits = bits_of(scaled)
    exponent = np.int64(bits >> np.uint32(23)) - 127 - shift - top_exponent
    if np.uint32(bits & np.uint32(0x7FFFFF)) > top_bits:
        exponent += 1
    return min(max(exponent + _E8M0_BIAS, 0), _E8M0_LAST)


@inner
def _e4m3_error(block: Any, multiplier: Any, squares: Any) -> Any:
    for k in range(block.size):
        kept = np.float32(from_e4m3(to_e4m3(np.float32(block[k] / multiplier))) * multiplier)
        difference = np.float64(np.float32(block[k] - kept))
        squares[k] = difference * difference
    return halve(squares)


@compiled
def quantize_mxfp4(
    source: Any,
    block_scale: Any,
    sweep: Any,
    packed: Any,
    scale: Any,
    signal: Any,
    error: Any,
    max_error: Any,
) -> None:
    weights = np.empty(source.shape[1], np.float32)
    restored, nibbles = np.empty(LANES, np.float32), np.empty(LANES, np.uint8)
    lanes, errors = np.empty(LANES), np.empty(LANES)
    squares = np.empty(MX_GROUP)
    pairs = nibbles.view(np.uint16)
    for row in range(source.shape[0]):
        load_row(source, block_scale, row, weights)
        lanes[:] = 0.0
        errors[:] = 0.0
        biggest = np.uint32(0)
        for first in range(0, weights.size, LANES):
            prefetch(source, row + 1, first)
            segment = weights[first : first + LANES]
            for start in range(0, segment.size, MX_GROUP):
                block = segment[start : start + MX_GROUP]
                code = _exponent(largest(block), _E2M1_TOP_BITS, _E2M1_TOP_EXPONENT)
                if sweep and code > 0:
                    upper = _block_error(block, _power_of_two(code), squares)
                    if _block_error(block, _power_of_two(code - 1), squares) < upper:
                        code -= 1
                scale[row, (first + start) // MX_GROUP] = np.uint8(code)
                _block_codes(block, _power_of_two(code), nibbles[start:], restored[start:])
            out = packed[row, first // 2 : first // 2 + segment.size // 2]
            for k in range(out.size):
                out[k] = np.uint8(pairs[k] | pairs[k] >> np.uint16(4))
            biggest = add_errors(segment, restored, lanes, errors, biggest)
        end_row(row, lanes, errors, biggest, (signal, error, max_error))


@compiled
def quantize_mxfp8(
    source: Any,
    block_scale: Any,
    sweep: Any,
    codes: Any,
    scale: Any,
    signal: Any,
    error: Any,
    max_error: Any,
) -> None:
    weights, restored = np.empty(source.shape[1], np.float32), np.empty(LANES, np.float32)
    lanes, errors = np.empty(LANES), np.empty(LANES)
    squares = np.empty(MX_GROUP)
    for row in range(source.shape[0]):
        load_row(source, block_scale, row, weights)
        lanes[:] = 0.0
        errors[:] = 0.0
        biggest = np.uint32(0)
        for first in range(0, weights.size, LANES):
            prefetch(source, row + 1, first)
            segment = weights[first : first + LANES]
            for start in range(0, segment.size, MX_GROUP):
                block = segment[start : start + MX_GROUP]
                code = _exponent(largest(block), _E4M3_TOP_BITS, _E4M3_TOP_EXPONENT)
                if sweep and code > 0:
                    upper = _e4m3_error(block, _power_of_two(code), squares)
                    if _e4m3_error(block, _power_of_two(code - 1), squares) < upper:
                        code -= 1
                scale[row, (first + start) // MX_GROUP] = np.uint8(code)
                multiplier = _power_of_two(code)
                out = codes[row, first + start : first + start + MX_GROUP]
                for k in range(block.size):
                    number = to_e4m3(np.float32(block[k] / multiplier))
                    out[k] = number
                    restored[start + k] = np.float32(from_e4m3(number) * multiplier)
            biggest = add_errors(segment, restored, lanes, errors, biggest)
        end_row(row, lanes, errors, biggest, (signal, error, max_error))


@compiled
def row_maxima(source: Any, block_scale: Any, out: Any) -> None:
    """Write the largest magnitude of each row; of rows with NaN, NaN."""
    weights = np.empty(source.shape[1], np.float32)
    for row in range(source.shape[0]):
        load_row(source, block_scale, row, weights)
        out[row] = largest(weights)
