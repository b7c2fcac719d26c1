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
# Where the spacing of fp32 is that of e2m1 numbers below 2, below 4, and above.
_ROUNDER_OF_HALF, _ROUNDER_OF_1, _ROUNDER_OF_2 = map(np.float32, (2.0**22, 2.0**23, 2.0**24))
_SIGN = np.uint32(0x80000000)
_CODE_SHIFT = np.uint32(252)  # of the upper bits of fp32 numbers from 1 to 6
MX_GROUP = block_floats.MX_GROUP
_E8M0_BIAS, _E8M0_LAST = block_floats.E8M0_BIAS, block_floats.E8M0_LAST
# The largest numbers as mantissas from 1 to 2: 6 is 1.5 * 2**2, 448 is 1.75 * 2**8.
_E2M1_TOP_BITS, _E2M1_TOP_EXPONENT = np.uint32(0x400000), 2
_E4M3_TOP_BITS, _E4M3_TOP_EXPONENT = np.uint32(0x600000), 8
_UNDERFLOW = np.uint8(block_floats.UNDERFLOW)
_LAST_CODE = block_floats.E4M3_CODES[-1]
_GROUPS = LANES // GROUP  # of a segment
_FIRST_NORMAL, _OCTAVE = 8, 8  # e4m3 codes: twice the scale of a normal one is 8 codes further


@inner
def _rounded_e2m1(magnitude: Any) -> Any:
    """Return the e2m1 number that a magnitude is rounded to, ties to even codes."""
    capped = magnitude if magnitude < _E2M1_MAX else _E2M1_MAX
    rounder = _ROUNDER_OF_1 if capped < np.float32(4) else _ROUNDER_OF_2
    rounder = _ROUNDER_OF_HALF if capped < np.float32(2) else rounder
    return np.float32(np.float32(capped + rounder) - rounder)


@inner
def _e2m1_code(number: Any) -> Any:
    """Return the code of an e2m1 number without its sign."""
    normal = np.uint32(np.uint32(bits_of(number) >> np.uint32(22)) - _CODE_SHIFT)
    subnormal = np.uint32(1) if number > np.float32(0) else np.uint32(0)
    return normal if number >= np.float32(1) else subnormal


@inner
def _multiplier(code: Any, divisor: Any) -> Any:
    return np.float32(from_e4m3(code) / divisor)


@inner
def _group_maxima(weights: Any, group: Any, maxima: Any) -> None:
    for index in range(maxima.size):
        maxima[index] = largest(weights[index * group : (index + 1) * group])


@inner
def _spread(multipliers: Any, group: Any, out: Any) -> None:
    """Write the multiplier of each number of some groups."""
    for index in range(multipliers.size):
        part = out[index * group : (index + 1) * group]
        for k in range(part.size):
            part[k] = multipliers[index]


@inner
def _block_error(block: Any, multiplier: Any, squares: Any) -> Any:
    for k in range(block.size):
        number = _rounded_e2m1(float_of(magnitude_bits(np.float32(block[k] / multiplier))))
        kept = np.float32(number * multiplier)
        difference = np.float64(np.float32(float_of(magnitude_bits(block[k])) - kept))
        squares[k] = difference * difference
    return halve(squares)


@inner
def _first_scale(amax: Any, divisor: Any, table: Any) -> Any:
    """Return the code of the smallest scale that clips nothing."""
    code: Any = max(np.int64(to_e4m3(np.float32(divisor * np.float32(amax / _E2M1_MAX)))), 1)
    while code > 1 and amax <= np.float32(_E2M1_MAX * table[code - 1]):
        code -= 1
    while code < _LAST_CODE and amax > np.float32(_E2M1_MAX * table[code]):
        code += 1
    return code


@inner
def _side_by_side(segment: Any, turned: Any) -> None:
    """Write the magnitudes of a segment's groups side by side, the first of each first; groups
    that it does not have are zeros."""
    turned[:] = np.float32(0)
    for group in range(segment.size // GROUP):
        block = segment[group * GROUP : (group + 1) * GROUP]
        for k in range(GROUP):
            turned[k * _GROUPS + group] = float_of(magnitude_bits(block[k]))


@inner
def _errors_of_groups(turned: Any, multipliers: Any, spread: Any, squares: Any) -> None:
    """Compute the squared errors of groups that lie side by side, into the first squares."""
    for k in range(GROUP):
        for group in range(_GROUPS):
            spread[k * _GROUPS + group] = multipliers[group]
    for k in range(turned.size):
        number = _rounded_e2m1(np.float32(turned[k] / spread[k]))
        difference = np.float64(np.float32(turned[k] - np.float32(number * spread[k])))
        squares[k] = difference * difference
    for k in range(64):
        squares[k] += squares[k + 64]
    for k in range(32):
        squares[k] += squares[k + 32]
    for k in range(16):
        squares[k] += squares[k + 16]
    for k in range(8):
        squares[k] += squares[k + 8]


@inner
def _clipping(amax: Any, multiplier: Any) -> Any:
    """Return the square that clipping costs the largest number alone."""
    difference = np.float64(np.float32(amax - np.float32(_E2M1_MAX * multiplier)))
    return difference * difference


@inner
def _larger_scales(first: Any, table: Any, room: Any, best: Any, least: Any) -> None:
    """Try the scales that clip nothing, up to twice the smallest: from there on a scale never has
    a smaller error than half of it, whose grid has all of its numbers."""
    turned, multipliers, spread, squares = room
    steps = 0
    for group in range(_GROUPS):
        last = min(max(first[group], _FIRST_NORMAL) + _OCTAVE - 1, _LAST_CODE)
        steps = max(steps, last - first[group] + 1)
        least[group] = np.inf
    for step in range(steps):
        for group in range(_GROUPS):
            multipliers[group] = table[min(first[group] + step, _LAST_CODE)]
        _errors_of_groups(turned, multipliers, spread, squares)
        for group in range(_GROUPS):  # more than an octave does no harm
            is_less = squares[group] < least[group]
            least[group] = squares[group] if is_less else least[group]
            best[group] = min(first[group] + step, _LAST_CODE) if is_less else best[group]


@inner
def _smaller_scales(first: Any, maxima: Any, table: Any, room: Any, best: Any, least: Any) -> None:
    """Try smaller scales, until clipping alone costs more than the best."""
    turned, multipliers, spread, squares = room
    for step in range(1, _LAST_CODE):
        tried: Any = 0
        for group in range(_GROUPS):
            code = max(first[group] - step, 1)
            cost = _clipping(maxima[group], table[code])
            tried += np.int64(first[group] > step and cost <= least[group])
            multipliers[group] = table[code]
        if tried == 0:
            break
        _errors_of_groups(turned, multipliers, spread, squares)
        for group in range(_GROUPS):  # what clips too much has a larger error by itself
            is_less = squares[group] <= least[group]
            least[group] = squares[group] if is_less else least[group]
            best[group] = max(first[group] - step, 1) if is_less else best[group]


@inner
def _swept_scales(weights: Any, maxima: Any, divisor: Any, codes: Any) -> None:
    """Compute the scales of least squared error of all, having tried those that can have it."""
    turned, spread = np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    multipliers, squares = np.empty(_GROUPS, np.float32), np.empty(LANES)
    room = (turned, multipliers, spread, squares)
    first, best = np.empty(_GROUPS, np.int64), np.empty(_GROUPS, np.int64)
    least, largest_of = np.empty(_GROUPS), np.empty(_GROUPS, np.float32)
    table = np.empty(_LAST_CODE + 1, np.float32)
    for code in range(table.size):
        table[code] = _multiplier(code, divisor)
    for start in range(0, weights.size, LANES):
        segment = weights[start : start + LANES]
        count = segment.size // GROUP
        _side_by_side(segment, turned)
        for group in range(_GROUPS):
            inside = group < count
            largest_of[group] = maxima[start // GROUP + group] if inside else np.float32(0)
            first[group] = _first_scale(largest_of[group], divisor, table)
        _larger_scales(first, table, room, best, least)
        _smaller_scales(first, largest_of, table, room, best, least)
        for group in range(count):
            codes[start // GROUP + group] = np.uint8(best[group])


@inner
def _amax_scales(maxima: Any, divisor: Any, codes: Any) -> None:
    for index in range(maxima.size):
        code = to_e4m3(np.float32(np.float32(maxima[index] / _E2M1_MAX) * divisor))
        codes[index] = _UNDERFLOW if code == np.uint8(0) else code


@inner
def _e2m1_codes(segment: Any, multipliers: Any, nibbles: Any, kept: Any) -> None:
    """Write the codes of a segment, each number under a multiplier of its own."""
    for k in range(segment.size):
        quotient = np.float32(segment[k] / multipliers[k])
        magnitude = magnitude_bits(quotient)
        number = _rounded_e2m1(float_of(magnitude))
        sign = np.uint32(bits_of(quotient) & _SIGN)
        sign = sign if magnitude > np.uint32(0) else np.uint32(0)
        nibbles[k] = np.uint8(np.uint32(_e2m1_code(number) | np.uint32(sign >> np.uint32(28))))
        kept[k] = np.float32(float_of(np.uint32(bits_of(number) | sign)) * multipliers[k])


@inner
def _pack_row(
    source: Any, row: Any, weights: Any, multipliers: Any, group: Any, packed: Any, work: Any
) -> Any:
    """Write the codes of a row, two in a byte, under the multipliers of its groups, and add up its
    energies and errors; return the bits of the largest error."""
    spread, restored, nibbles, pairs, lanes, errors = work
    lanes[:] = 0.0
    errors[:] = 0.0
    biggest = np.uint32(0)
    for first in range(0, weights.size, LANES):
        prefetch(source, row + 1, first)
        segment = weights[first : first + LANES]
        _spread(multipliers[first // group : (first + segment.size) // group], group, spread)
        _e2m1_codes(segment, spread, nibbles, restored)
        out = packed[first // 2 : (first + segment.size) // 2]
        for k in range(out.size):
            out[k] = np.uint8(pairs[k] | pairs[k] >> np.uint16(4))
        biggest = add_errors(segment, restored, lanes, errors, biggest)
    return biggest


@compiled
def nvfp4_swept_scales(source: Any, block_scale: Any, divisor: Any, scale: Any) -> None:
    """Write the codes of the scales of least squared error; a kernel of its own, of which LLVM
    makes vector code."""
    weights, maxima = np.empty(source.shape[1], np.float32), np.empty(scale.shape[1], np.float32)
    for row in range(source.shape[0]):
        load_row(source, block_scale, row, weights)
        _group_maxima(weights, GROUP, maxima)
        _swept_scales(weights, maxima, divisor, scale[row])


@compiled
def quantize_nvfp4(
    source: Any,
    block_scale: Any,
    divisor: Any,
    has_scales: Any,
    scale: Any,
    packed: Any,
    signal: Any,
    error: Any,
    max_error: Any,
) -> None:
    weights, nibbles = np.empty(source.shape[1], np.float32), np.empty(LANES, np.uint8)
    spread, restored = np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    lanes, errors = np.empty(LANES), np.empty(LANES)
    work = (spread, restored, nibbles, nibbles.view(np.uint16), lanes, errors)
    multipliers = np.empty(scale.shape[1], np.float32)
    for row in range(source.shape[0]):
        load_row(source, block_scale, row, weights)
        if not has_scales:
            _group_maxima(weights, GROUP, multipliers)
            _amax_scales(multipliers, divisor, scale[row])
        for index in range(multipliers.size):
            multipliers[index] = _multiplier(scale[row, index], divisor)
        biggest = _pack_row(source, row, weights, multipliers, GROUP, packed[row], work)
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
    for k in range(MX_GROUP):
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
    weights, nibbles = np.empty(source.shape[1], np.float32), np.empty(LANES, np.uint8)
    spread, restored = np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    lanes, errors = np.empty(LANES), np.empty(LANES)
    work = (spread, restored, nibbles, nibbles.view(np.uint16), lanes, errors)
    squares = np.empty(MX_GROUP)
    maxima = np.empty(scale.shape[1], np.float32)
    multipliers = np.empty_like(maxima)
    for row in range(source.shape[0]):
        load_row(source, block_scale, row, weights)
        _group_maxima(weights, MX_GROUP, maxima)
        for index in range(maxima.size):
            code = _exponent(maxima[index], _E2M1_TOP_BITS, _E2M1_TOP_EXPONENT)
            if sweep and code > 0:
                block = weights[index * MX_GROUP : (index + 1) * MX_GROUP]
                upper = _block_error(block, _power_of_two(code), squares)
                if _block_error(block, _power_of_two(code - 1), squares) < upper:
                    code -= 1
            scale[row, index] = np.uint8(code)
            multipliers[index] = _power_of_two(code)
        biggest = _pack_row(source, row, weights, multipliers, MX_GROUP, packed[row], work)
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
    squares, multipliers = np.empty(MX_GROUP), np.empty(LANES, np.float32)
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
                for k in range(MX_GROUP):
                    multipliers[start + k] = multiplier
            out = codes[row, first : first + segment.size]
            for k in range(segment.size):
                number = to_e4m3(np.float32(segment[k] / multipliers[k]))
                out[k] = number
                restored[k] = np.float32(from_e4m3(number) * multipliers[k])
            biggest = add_errors(segment, restored, lanes, errors, biggest)
        end_row(row, lanes, errors, biggest, (signal, error, max_error))


@compiled
def row_maxima(source: Any, block_scale: Any, out: Any) -> None:
    """Write the largest magnitude of each row; of rows with NaN, NaN."""
    weights = np.empty(source.shape[1], np.float32)
    for row in range(source.shape[0]):
        load_row(source, block_scale, row, weights)
        out[row] = largest(weights)
