"""Compiled encoders of ggml's blocks of 32 elements, the scales of 16 of them side by side."""

from __future__ import annotations

from typing import Any

import numpy as np

from mtp_kernels.cpu.code import FLOAT_BYTES
from mtp_kernels.cpu.jit import compiled, inner
from mtp_kernels.cpu.vectors import address
from mtp_kernels.quantize.cpu_numbers import (
    bits_of,
    float_of,
    from_f16,
    magnitude_bits,
    prefetch,
    to_f16,
)
from mtp_kernels.quantize.cpu_rows import add_errors, end_row, load_row
from mtp_kernels.quantize.ggml_vectors import (
    MXFP4,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    SIZE,
    encode_block,
    farthest,
    largest_bits,
    least,
    most,
)
from mtp_kernels.quantize.layouts import LANES as SEGMENT
from mtp_kernels.sizes import LANES

_INFINITY = np.uint32(0x7F800000)
_ZERO, _ONE = np.float32(0), np.float32(1)
# Lines of the state of 16 blocks, each a number of every block: what scales are made of, what
# weights are multiplied by after the minimum was taken from them, scale and minimum as they are
# read.
MOST, LEAST, INVERSE, SCALE, MINIMUM = range(5)
_STRIP = LANES * SIZE
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
    _store_bits(bits, out, at)
    return from_f16(bits)


@inner
def _store_bits(bits: Any, out: Any, at: Any) -> None:
    out[at] = np.uint8(bits & np.uint16(0xFF))
    out[at + 1] = np.uint8(bits >> np.uint16(8))


@inner
def _inverse(scale: Any) -> Any:
    """Return 1 / scale; 0 where that is none, as for scales too small for half precision."""
    inverse = np.float32(_ONE / scale)
    return inverse if magnitude_bits(inverse) < _INFINITY else _ZERO


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
def _extents(kind: Any, at: Any, count: Any, state: Any) -> None:
    """Find what the scales of `count` blocks of elements from `at` on are made of."""
    for block in range(count):
        if kind in (Q8_0, MXFP4):
            state[MOST, block] = float_of(largest_bits(at))
        elif kind in (Q4_0, Q5_0):
            state[MOST, block] = farthest(at)
        else:
            state[LEAST, block], state[MOST, block] = least(at), most(at)
        at += FLOAT_BYTES * SIZE


@inner
def _scales(kind: Any, state: Any, stored: Any) -> None:
    """Compute the scales of 16 blocks as they are stored, and the lines of `state` to code with."""
    if kind == MXFP4:
        for block in range(LANES):
            code = _exponent(bits_of(state[MOST, block]))
            stored[0, block] = code
            state[SCALE, block] = half_of_e8m0(code)
        return
    divisor, has_minimum = _divisor(kind), kind in (Q4_1, Q5_1)
    for block in range(LANES):
        low = state[LEAST, block] if has_minimum else _ZERO
        scale = np.float32(np.float32(state[MOST, block] - low) / divisor)
        state[INVERSE, block] = _inverse(scale)
        stored[0, block], stored[1, block] = to_f16(scale), to_f16(low)
        state[SCALE, block] = from_f16(stored[0, block])
        state[MINIMUM, block] = from_f16(stored[1, block])


@inner
def _divisor(kind: Any) -> Any:
    """Return the code of what the scale of a block is made of."""
    if kind == Q4_0:
        return np.float32(-8)
    if kind == Q5_0:
        return np.float32(-16)
    return np.float32(127 if kind == Q8_0 else 15 if kind == Q4_1 else 31)


@inner
def _store_scale(kind: Any, stored: Any, block: Any, out: Any, first: Any) -> Any:
    """Store the scale of a block, and a minimum; return the place behind."""
    if kind == MXFP4:
        out[first] = np.uint8(stored[0, block])
        return first + 1
    lines = 2 if kind in (Q4_1, Q5_1) else 1
    for line in range(lines):
        _store_bits(stored[line, block], out, first + 2 * line)
    return first + 2 * lines


@inner
def _encode(kind: Any, strip: Any, out: Any, state: Any, stored: Any, kept: Any) -> None:
    """Encode up to 16 blocks."""
    count = strip.size // SIZE
    _extents(kind, address(strip), count, state)
    _scales(kind, state, stored)
    for block in range(count):
        codes = _store_scale(kind, stored, block, out, block * (out.size // count))
        at = FLOAT_BYTES * SIZE * block
        encode_block(
            kind,
            address(strip) + at,
            state[INVERSE, block],
            state[SCALE, block],
            state[LEAST, block],
            state[MINIMUM, block],
            address(out) + codes,
            address(kept) + at,
        )


@inner
def e2m1_halves(code: Any) -> Any:
    """Return the number of a code in halves."""
    size = np.uint32(np.uint32(code) & np.uint32(7))
    above = np.uint32(size - np.uint32(4))
    value = size if size < np.uint32(5) else np.uint32(np.uint32(4) + np.uint32(above << 1))
    value = np.uint32(12) if size == np.uint32(7) else value
    whole = np.float32(np.int32(value))
    return -whole if code >= 8 else whole


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
    weights, kept = np.empty(source.shape[1], np.float32), np.empty(_STRIP, np.float32)
    state, stored = np.zeros((5, LANES), np.float32), np.empty((2, LANES), np.uint16)
    lanes, errors = np.empty(SEGMENT), np.empty(SEGMENT)
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
            _encode(kind, strip, out, state, stored, kept)
            for first in range(0, strip.size, SEGMENT):
                prefetch(source, row + 1, start + first)
                part = strip[first : first + SEGMENT]
                biggest = add_errors(part, kept[first : first + SEGMENT], lanes, errors, biggest)
        end_row(row, lanes, errors, biggest, (signal, error, max_error))
