"""Compiled encoders of ggml's blocks of 32 elements, over strips of rows that stay in cache.

Every step is a loop over a whole strip, which LLVM turns into vector code; one over the elements of
a block would be too short for that.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mtp_kernels.cpu.jit import compiled, inner
from mtp_kernels.quantize.cpu_numbers import (
    ROUNDER,
    bits_of,
    float_of,
    from_f16,
    magnitude_bits,
    prefetch,
    store_word,
    to_f16,
)
from mtp_kernels.quantize.cpu_rows import add_errors, end_row, load_row
from mtp_kernels.quantize.layouts import LANES

Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, MXFP4 = range(6)
SIZE = 32  # elements of a block
HALF = SIZE // 2
_STRIP = 1024
_NEGATIVE, _ALL = np.uint32(0x80000000), np.uint32(0xFFFFFFFF)
_INFINITY = np.uint32(0x7F800000)
_ZERO, _ONE, _HALF = np.float32(0), np.float32(1), np.float32(0.5)
_INT8_MAX = np.float32(127)
_NEAR_TWO = 64  # of the mantissas: those whose logarithm may round up
_MXFP4_TOP = 2  # exponent of the largest power of two of e2m1


def _first_above() -> Any:
    """Return for each exponent of fp32 the first mantissa whose logarithm to base 2 rounds, in
    fp32, to the next whole number: exponents of blocks are that of the rounded one."""
    exponents = np.arange(256)[:, None]
    mantissas = np.arange((1 << 23) - _NEAR_TWO, 1 << 23)[None]
    logarithms = exponents - 127 + np.log2(1 + mantissas / (1 << 23))
    is_next = np.floor(logarithms.astype(np.float32)) > exponents - 127
    return ((1 << 23) - is_next.sum(axis=1)).astype(np.uint32)


_FIRST_ABOVE = _first_above()


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
    return inverse if magnitude_bits(inverse) < _INFINITY else _ZERO


@inner
def _fold(bits: Any, other: Any, size: Any) -> None:
    """Leave in `other` the largest of each block of `bits`."""
    for k in range(size // 2):
        other[k] = max(bits[2 * k], bits[2 * k + 1])
    for k in range(size // 4):
        bits[k] = max(other[2 * k], other[2 * k + 1])
    for k in range(size // 8):
        other[k] = max(bits[2 * k], bits[2 * k + 1])
    for k in range(size // 16):
        bits[k] = max(other[2 * k], other[2 * k + 1])
    for k in range(size // SIZE):
        other[k] = max(bits[2 * k], bits[2 * k + 1])


@inner
def _spread(values: Any, other: Any, size: Any) -> None:
    """Give each element of the blocks of `values` its block's number, which is at the front."""
    for k in range(size // SIZE):
        other[2 * k] = other[2 * k + 1] = values[k]
    for k in range(size // 16):
        values[2 * k] = values[2 * k + 1] = other[k]
    for k in range(size // 8):
        other[2 * k] = other[2 * k + 1] = values[k]
    for k in range(size // 4):
        values[2 * k] = values[2 * k + 1] = other[k]
    for k in range(size // 2):
        other[2 * k] = other[2 * k + 1] = values[k]
    for k in range(size):
        values[k] = other[k]


@inner
def _largest(strip: Any, bits: Any, found: Any) -> None:
    for k in range(strip.size):
        bits[k] = magnitude_bits(strip[k])
    _fold(bits, found, strip.size)


@inner
def _farthest(strip: Any, bits: Any, above: Any, below: Any) -> None:
    """Leave in `above` the bits of the number of each block that is farthest from 0; of two, the
    first."""
    for k in range(strip.size):
        size = magnitude_bits(strip[k])
        bits[k] = size if bits_of(strip[k]) == size else np.uint32(0)
    _fold(bits, above, strip.size)
    for k in range(strip.size):
        size = magnitude_bits(strip[k])
        bits[k] = np.uint32(0) if bits_of(strip[k]) == size else size
    _fold(bits, below, strip.size)
    for block in range(strip.size // SIZE):
        if above[block] == below[block]:
            k = block * SIZE
            while magnitude_bits(strip[k]) != above[block]:
                k += 1
            above[block] = bits_of(strip[k])
        elif below[block] > above[block]:
            above[block] = np.uint32(below[block] | _NEGATIVE)


@inner
def _ordered(value: Any) -> Any:
    """Return bits that are ordered as the numbers are."""
    bits = bits_of(value)
    return np.uint32(bits ^ (_NEGATIVE if bits < _NEGATIVE else _ALL))


@inner
def _of_order(ordered: Any) -> Any:
    return float_of(np.uint32(ordered ^ (_ALL if ordered < _NEGATIVE else _NEGATIVE)))


@inner
def _extremes(strip: Any, bits: Any, most: Any, least: Any) -> None:
    """Leave the largest and the least of each block, ordered, the least complemented."""
    for k in range(strip.size):
        bits[k] = _ordered(strip[k])
    _fold(bits, most, strip.size)
    for k in range(strip.size):
        bits[k] = np.uint32(~_ordered(strip[k]))
    _fold(bits, least, strip.size)


@inner
def half_of_e8m0(code: Any) -> Any:
    """Return half of the power of two that an exponent stands for: the codes count halves."""
    bits = np.uint32(np.uint32(code) - np.uint32(1)) << np.uint32(23)
    return float_of(np.uint32(0x200000) << np.uint32(code) if code < 2 else bits)


@inner
def _exponent(bits: Any) -> Any:
    """Return the exponent of a block whose largest magnitude has these bits."""
    exponent = np.int64(bits >> np.uint32(23))
    above = np.uint32(bits & np.uint32(0x7FFFFF)) >= _FIRST_ABOVE[exponent]
    code = np.int64(exponent + np.int64(above) - _MXFP4_TOP)
    return np.uint8(code if code > 0 else np.int64(0))


@inner
def _block_scale(kind: Any, found: Any, least: Any, out: Any, at: Any) -> Any:
    """Store the scale of a block, and a minimum; return what weights are multiplied with after the
    minimum was taken from them, the scale that is read, and the exact minimum and that read."""
    if kind == MXFP4:
        code = _exponent(found)
        out[at] = code
        return _ONE, half_of_e8m0(code), _ZERO, _ZERO
    if kind == Q4_1 or kind == Q5_1:  # noqa: SIM109
        low = _of_order(np.uint32(~least))
        top = np.float32(15 if kind == Q4_1 else 31)
        scale = np.float32(np.float32(_of_order(found) - low) / top)
        read = store_half(scale, out, at)
        return _inverse(scale), read, low, store_half(low, out, at + 2)
    divisor = _INT8_MAX if kind == Q8_0 else np.float32(-8 if kind == Q4_0 else -16)
    scale = np.float32(float_of(found) / divisor)
    return _inverse(scale), store_half(scale, out, at), _ZERO, _ZERO


@inner
def _code_q8_0(weights: Any, inverse: Any, scale: Any, codes: Any, kept: Any) -> None:
    for k in range(weights.size):
        scaled = np.float32(weights[k] * inverse[k])
        size = float_of(magnitude_bits(scaled))
        near = np.float32(np.float32(size + ROUNDER) - ROUNDER)
        # Halves go away from 0: to even, some went down.
        near = np.float32(near + _ONE) if np.float32(size - near) >= _HALF else near
        whole = -near if scaled < _ZERO else near
        codes[k] = np.uint8(bits_of(np.float32(whole + ROUNDER)))
        kept[k] = np.float32(whole * scale[k])


@inner
def _code_symmetric(
    bits: Any, weights: Any, inverse: Any, scale: Any, codes: Any, kept: Any
) -> None:
    """Code as Q4_0 or Q5_0: the number farthest from 0 has the lowest code."""
    offset, top = np.float32(1 << (bits - 1)), np.float32((1 << bits) - 1)
    middle = np.float32(offset + _HALF)
    for k in range(weights.size):
        shifted = np.float32(np.float32(weights[k] * inverse[k]) + middle)
        floor = np.float32(np.floor(shifted))
        code = floor if floor < top else top
        codes[k] = np.uint8(bits_of(np.float32(code + ROUNDER)))
        kept[k] = np.float32(np.float32(code - offset) * scale[k])


@inner
def _code_above_minimum(
    bits: Any, weights: Any, inverse: Any, scale: Any, minimum: Any, codes: Any, kept: Any
) -> None:
    """Code as Q4_1 or Q5_1: codes count steps above the least number."""
    top, (exact, read) = np.float32((1 << bits) - 1), minimum
    for k in range(weights.size):
        steps = np.float32(np.float32(weights[k] - exact[k]) * inverse[k])
        floor = np.float32(np.floor(np.float32(steps + _HALF)))
        code = floor if floor < top else top
        codes[k] = np.uint8(bits_of(np.float32(code + ROUNDER)))
        kept[k] = np.float32(np.float32(code * scale[k]) + read[k])


@inner
def _code_mxfp4(weights: Any, scale: Any, codes: Any, kept: Any) -> None:
    """Code as the nearest of 0, 1, 2, 3, 4, 6, 8 and 12 halves, of two the smaller one."""
    for k in range(weights.size):
        size, unit = float_of(magnitude_bits(weights[k])), scale[k]
        code = np.uint32(size > np.float32(0.5) * unit)
        code = np.uint32(code + np.uint32(size > np.float32(1.5) * unit))
        code = np.uint32(code + np.uint32(size > np.float32(2.5) * unit))
        code = np.uint32(code + np.uint32(size > np.float32(3.5) * unit))
        code = np.uint32(code + np.uint32(size > np.float32(5) * unit))
        code = np.uint32(code + np.uint32(size > np.float32(7) * unit))
        code = np.uint32(code + np.uint32(size > np.float32(10) * unit))
        below = weights[k] < _ZERO and code > np.uint32(0)
        code = np.uint32(code | (np.uint32(8) if below else np.uint32(0)))
        codes[k] = np.uint8(code)
        kept[k] = np.float32(unit * e2m1_halves(code))


@inner
def e2m1_halves(code: Any) -> Any:
    """Return the number of a code in halves."""
    size = np.uint32(np.uint32(code) & np.uint32(7))
    above = np.uint32(size - np.uint32(4))
    value = size if size < np.uint32(5) else np.uint32(np.uint32(4) + np.uint32(above << 1))
    value = np.uint32(12) if size == np.uint32(7) else value
    whole = np.float32(np.int32(value))
    return -whole if code >= 8 else whole


@inner
def _pack_nibbles(words: Any, out: Any, at: Any) -> None:
    """Put the low four bits of 32 codes, given as four words, into 16 bytes: those of the second
    half into the high bits."""
    low_bits = np.uint64(0x0F0F0F0F0F0F0F0F)
    for half in range(2):
        low, high = words[half] & low_bits, words[half + 2] & low_bits
        both = np.uint64(low | np.uint64(high << np.uint64(4)))
        store_word(out, at + 8 * half, both)


@inner
def _pack_fifth_bits(words: Any, out: Any, at: Any) -> None:
    """Put the fifth bits of 32 codes into four bytes, by a product that collects those of eight."""
    for word in range(4):
        bits = np.uint64(words[word] >> np.uint64(4)) & np.uint64(0x0101010101010101)
        spread = np.uint64(bits * np.uint64(0x0102040810204080))
        out[at + word] = np.uint8(spread >> np.uint64(56))


@inner
def _pack(kind: Any, words: Any, out: Any) -> None:
    """Put the codes of a strip behind their scales."""
    block_bytes = out.size // (words.size // 4)
    for block in range(words.size // 4):
        own, at = words[4 * block : 4 * block + 4], block * block_bytes
        if kind == Q8_0:
            for word in range(4):
                store_word(out, at + 2 + 8 * word, own[word])
            continue
        first = at + (1 if kind == MXFP4 else 4 if kind in (Q4_1, Q5_1) else 2)
        if kind in (Q5_0, Q5_1):
            _pack_fifth_bits(own, out, first)
            first += 4
        _pack_nibbles(own, out, first)


@inner
def _scales(kind: Any, strip: Any, out: Any, bits: Any, found: Any, spread: Any) -> None:
    """Store the scales of a strip's blocks, and spread them over its elements."""
    most, least = found
    if kind in (Q8_0, MXFP4):
        _largest(strip, bits, most)
    elif kind in (Q4_0, Q5_0):
        _farthest(strip, bits, most, least)
    else:
        _extremes(strip, bits, most, least)
    (inverse, scale, exact, read), other = spread
    block_bytes = out.size // (strip.size // SIZE)
    for block in range(strip.size // SIZE):
        of_block = _block_scale(kind, most[block], least[block], out, block * block_bytes)
        inverse[block], scale[block], exact[block], read[block] = of_block
    _spread(scale, other, strip.size)
    if kind != MXFP4:
        _spread(inverse, other, strip.size)
    if kind in (Q4_1, Q5_1):
        _spread(exact, other, strip.size)
        _spread(read, other, strip.size)


@inner
def _encode(kind: Any, strip: Any, spread: Any, codes: Any, kept: Any) -> None:
    inverse, scale, exact, read = spread[0]
    if kind == Q8_0:
        _code_q8_0(strip, inverse, scale, codes, kept)
    elif kind in (Q4_0, Q5_0):
        _code_symmetric(4 if kind == Q4_0 else 5, strip, inverse, scale, codes, kept)
    elif kind == MXFP4:
        _code_mxfp4(strip, scale, codes, kept)
    else:
        bits = 4 if kind == Q4_1 else 5
        _code_above_minimum(bits, strip, inverse, scale, (exact, read), codes, kept)


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
    kept, codes = np.empty(_STRIP, np.float32), np.empty(_STRIP, np.uint8)
    bits = np.empty(_STRIP, np.uint32)
    found = (np.empty(_STRIP, np.uint32), np.empty(_STRIP, np.uint32))
    each = (
        np.empty(_STRIP, np.float32),
        np.empty(_STRIP, np.float32),
        np.empty(_STRIP, np.float32),
        np.empty(_STRIP, np.float32),
    )
    spread = (each, np.empty(_STRIP, np.float32))
    words = codes.view(np.uint64)
    lanes, errors = np.empty(LANES), np.empty(LANES)
    block_bytes = packed.shape[1] // (weights.size // SIZE)
    for row in range(source.shape[0]):
        load_row(source, block_scale, row, weights)
        lanes[:] = 0.0
        errors[:] = 0.0
        biggest = np.uint32(0)
        for start in range(0, weights.size, _STRIP):
            strip = weights[start : start + _STRIP]
            at = start // SIZE * block_bytes
            out = packed[row, at : at + strip.size // SIZE * block_bytes]
            _scales(kind, strip, out, bits, found, spread)
            _encode(kind, strip, spread, codes, kept)
            _pack(kind, words[: strip.size // 8], out)
            for first in range(0, strip.size, LANES):
                prefetch(source, row + 1, start + first)
                part = strip[first : first + LANES]
                biggest = add_errors(part, kept[first : first + LANES], lanes, errors, biggest)
        end_row(row, lanes, errors, biggest, (signal, error, max_error))
