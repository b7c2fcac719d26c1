"""Compiled encoders of ggml's blocks, over rows that stay in cache."""

from __future__ import annotations

from math import log2
from typing import Any

import numpy as np

from mtp_kernels.cpu.jit import compiled, inner
from mtp_kernels.quantize.cpu_numbers import (
    ROUNDER,
    bits_of,
    float_of,
    from_f16,
    largest,
    magnitude_bits,
    prefetch,
    to_f16,
)
from mtp_kernels.quantize.cpu_rows import add_errors, end_row, load_row
from mtp_kernels.quantize.layouts import LANES

Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, MXFP4 = range(6)
SIZE = 32  # elements of a block
HALF = SIZE // 2
_NEGATIVE, _ALL = np.uint32(0x80000000), np.uint32(0xFFFFFFFF)
_ZERO, _ONE, _HALF = np.float32(0), np.float32(1), np.float32(0.5)
_INT8_MAX = np.float32(127)
_MXFP4_BIAS = 127
_MXFP4_TOP = 2  # exponent of the largest power of two of e2m1


@inner
def half_of_bytes(block: Any, at: Any) -> Any:
    """Return the number of half precision that lies in two bytes."""
    return from_f16(np.uint16(np.uint32(block[at]) | np.uint32(block[at + 1]) << np.uint32(8)))


@inner
def store_half(value: Any, out: Any, at: Any) -> Any:
    """Store a number in half precision; return it as that is read."""
    bits = to_f16(value)
    out[at] = np.uint8(bits & np.uint16(0xFF))
    out[at + 1] = np.uint8(bits >> np.uint16(8))
    return from_f16(bits)


@inner
def _inverse(scale: Any) -> Any:
    """Return 1 / scale; 0 where that is none, as for scales too small for half precision."""
    inverse = np.float32(_ONE / scale)
    return inverse if magnitude_bits(inverse) < np.uint32(0x7F800000) else _ZERO


@inner
def _byte_of(whole: Any) -> Any:
    """Return the low byte of a whole number that fp32 holds."""
    return np.uint8(bits_of(np.float32(whole + ROUNDER)))


@inner
def _encode_q8_0(part: Any, out: Any, kept: Any) -> None:
    scale = np.float32(largest(part) / _INT8_MAX)
    inverse = _inverse(scale)
    stored = store_half(scale, out, 0)
    for k in range(SIZE):
        scaled = np.float32(part[k] * inverse)
        size = float_of(magnitude_bits(scaled))
        floor = np.float32(np.floor(size))
        rounded = floor + _ONE if np.float32(size - floor) >= _HALF else floor  # half away from 0
        whole = -rounded if scaled < _ZERO else rounded
        out[2 + k] = _byte_of(whole)
        kept[k] = np.float32(whole * stored)


@inner
def _farthest(part: Any) -> Any:
    """Return the number of the largest magnitude; of two, the first."""
    above, below = np.uint32(0), np.uint32(0)
    for k in range(SIZE):
        bits, size = bits_of(part[k]), magnitude_bits(part[k])
        above = max(above, size if bits < _NEGATIVE else np.uint32(0))
        below = max(below, np.uint32(0) if bits < _NEGATIVE else size)
    if above == below:
        for k in range(SIZE):
            if magnitude_bits(part[k]) == above:
                return part[k]
    return float_of(above) if above > below else -float_of(below)


@inner
def _extremes(part: Any) -> Any:
    """Return the least and the largest number: their bits, changed so, are ordered as they are."""
    least, most = _ALL, np.uint32(0)
    for k in range(SIZE):
        bits = bits_of(part[k])
        ordered = np.uint32(bits ^ (_NEGATIVE if bits < _NEGATIVE else _ALL))
        least, most = min(least, ordered), max(most, ordered)
    return _of_order(least), _of_order(most)


@inner
def _of_order(ordered: Any) -> Any:
    return float_of(np.uint32(ordered ^ (_ALL if ordered < _NEGATIVE else _NEGATIVE)))


@inner
def _pack(codes: Any, out: Any, first: Any) -> None:
    """Put the low four bits of codes into bytes, those of the second half into the high ones."""
    for j in range(HALF):
        low, high = codes[j] & np.uint8(15), codes[j + HALF] & np.uint8(15)
        out[first + j] = np.uint8(low | np.uint8(high << np.uint8(4)))


@inner
def _pack_fifth_bits(codes: Any, out: Any, first: Any) -> None:
    bits = np.uint32(0)
    for k in range(SIZE):
        bits |= np.uint32(np.uint32(codes[k] >> np.uint8(4)) << np.uint32(k))
    for byte in range(4):
        out[first + byte] = np.uint8(np.uint32(bits >> np.uint32(8 * byte)) & np.uint32(0xFF))


@inner
def _encode_symmetric(part: Any, bits: Any, codes: Any, out: Any, kept: Any) -> None:
    """Encode as Q4_0 or Q5_0: the farthest number from 0 gets the lowest code."""
    offset = np.float32(1 << (bits - 1))
    top = np.float32((1 << bits) - 1)
    scale = np.float32(_farthest(part) / -offset)
    inverse = _inverse(scale)
    stored = store_half(scale, out, 0)
    for k in range(SIZE):
        shifted = np.float32(np.float32(part[k] * inverse) + np.float32(offset + _HALF))
        floor = np.float32(np.floor(shifted))
        code = floor if floor < top else top
        codes[k] = _byte_of(code)
        kept[k] = np.float32(np.float32(code - offset) * stored)
    if bits == 5:
        _pack_fifth_bits(codes, out, 2)
    _pack(codes, out, 6 if bits == 5 else 2)


@inner
def _encode_above_minimum(part: Any, bits: Any, codes: Any, out: Any, kept: Any) -> None:
    """Encode as Q4_1 or Q5_1: codes count steps above the least number."""
    top = np.float32((1 << bits) - 1)
    least, most = _extremes(part)
    scale = np.float32(np.float32(most - least) / top)
    inverse = _inverse(scale)
    stored, minimum = store_half(scale, out, 0), store_half(least, out, 2)
    for k in range(SIZE):
        steps = np.float32(np.float32(part[k] - least) * inverse)
        floor = np.float32(np.floor(np.float32(steps + _HALF)))
        code = floor if floor < top else top
        codes[k] = _byte_of(code)
        kept[k] = np.float32(np.float32(code * stored) + minimum)
    if bits == 5:
        _pack_fifth_bits(codes, out, 4)
    _pack(codes, out, 8 if bits == 5 else 4)


@inner
def half_of_e8m0(code: Any) -> Any:
    """Return half of the power of two that an exponent stands for: the codes count halves."""
    bits = np.uint32(np.uint32(code) - np.uint32(1)) << np.uint32(23)
    return float_of(np.uint32(0x200000) << np.uint32(code) if code < 2 else bits)


@inner
def _exponent(amax: Any) -> Any:
    if amax == _ZERO:
        return np.uint8(0)
    found = int(np.floor(np.float32(log2(np.float64(amax))))) - _MXFP4_TOP + _MXFP4_BIAS
    return np.uint8(max(found, 0))


@inner
def _encode_mxfp4(part: Any, codes: Any, out: Any, kept: Any) -> None:
    """Encode as the nearest of 0, 1, 2, 3, 4, 6, 8 and 12 halves, of two the smaller one."""
    out[0] = _exponent(largest(part))
    unit = half_of_e8m0(out[0])
    for k in range(SIZE):
        size = float_of(magnitude_bits(part[k]))
        code = np.uint32(0)
        code += np.uint32(size > np.float32(0.5) * unit)
        code += np.uint32(size > np.float32(1.5) * unit)
        code += np.uint32(size > np.float32(2.5) * unit)
        code += np.uint32(size > np.float32(3.5) * unit)
        code += np.uint32(size > np.float32(5) * unit)
        code += np.uint32(size > np.float32(7) * unit)
        code += np.uint32(size > np.float32(10) * unit)
        below = part[k] < _ZERO and code > np.uint32(0)
        codes[k] = np.uint8(code | (np.uint32(8) if below else np.uint32(0)))
        kept[k] = np.float32(unit * e2m1_halves(codes[k]))
    _pack(codes, out, 1)


@inner
def e2m1_halves(code: Any) -> Any:
    """Return the number of a code in halves."""
    size = np.uint32(code) & np.uint32(7)
    above = np.uint32(size - np.uint32(4))
    value = size if size < np.uint32(5) else np.uint32(np.uint32(4) + np.uint32(above * 2))
    value = np.uint32(12) if size == np.uint32(7) else value
    whole = np.float32(np.int32(value))
    return -whole if code >= 8 else whole


@inner
def _encode(kind: Any, part: Any, codes: Any, out: Any, kept: Any) -> None:
    if kind == Q8_0:
        _encode_q8_0(part, out, kept)
    elif kind == Q4_0:
        _encode_symmetric(part, 4, codes, out, kept)
    elif kind == Q5_0:
        _encode_symmetric(part, 5, codes, out, kept)
    elif kind == Q4_1:
        _encode_above_minimum(part, 4, codes, out, kept)
    elif kind == Q5_1:
        _encode_above_minimum(part, 5, codes, out, kept)
    else:
        _encode_mxfp4(part, codes, out, kept)


@compiled
def encode_rows(
    kind: Any,
    source: Any,
    block_scale: Any,
    packed: Any,
    signal: Any,
    error: Any,
    max_error: Any,
) -> None:
    weights = np.empty(source.shape[1], np.float32)
    restored, codes = np.empty(LANES, np.float32), np.empty(SIZE, np.uint8)
    lanes, errors = np.empty(LANES), np.empty(LANES)
    block_bytes = packed.shape[1] // (weights.size // SIZE)
    for row in range(source.shape[0]):
        load_row(source, block_scale, row, weights)
        out = packed[row]
        lanes[:] = 0.0
        errors[:] = 0.0
        biggest = np.uint32(0)
        at = 0
        for first in range(0, weights.size, LANES):
            prefetch(source, row + 1, first)
            segment = weights[first : first + LANES]
            for start in range(0, segment.size, SIZE):
                part, kept = segment[start : start + SIZE], restored[start : start + SIZE]
                _encode(kind, part, codes, out[at : at + block_bytes], kept)
                at += block_bytes
            biggest = add_errors(segment, restored, lanes, errors, biggest)
        end_row(row, lanes, errors, biggest, (signal, error, max_error))
