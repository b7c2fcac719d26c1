"""Compiled encoders of ggml's K-quants: blocks of 256 elements, in groups with small scales of
their own, which are found by least squares as llama.cpp finds them without an importance matrix.

Source: llama.cpp `ggml/src/ggml-quants.c`, quantize_row_q4_K_ref and its kin.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mtp_kernels.cpu.jit import compiled, inner
from mtp_kernels.quantize.cpu_numbers import bits_of, prefetch
from mtp_kernels.quantize.cpu_rows import add_errors, end_row, load_row
from mtp_kernels.quantize.ggml_decoded import Q4_K, Q5_K, Q6_K, SUPER, decode_q6_k, decode_q45_k
from mtp_kernels.quantize.ggml_encoded import store_half
from mtp_kernels.quantize.ggml_k_search import (
    ERROR,
    INVERSE,
    LEAST,
    MEAN,
    MINIMUM,
    MOST,
    SCALE,
    SQUARES,
    STATE_LINES,
    SUM_L,
    SUM_L2,
    SUM_W,
    SUM_X,
    SUM_XL,
    code_sums,
    codes,
    error,
    extent,
    farthest,
    signed_codes,
    signed_sums,
    squares,
)
from mtp_kernels.quantize.ggml_vectors import SIZE
from mtp_kernels.quantize.layouts import LANES as SEGMENT
from mtp_kernels.sizes import LANES

_SMALL = 16  # elements of a group of Q6_K
_ZERO, _ONE, _TENTH = np.float32(0), np.float32(1), np.float32(0.1)
_MAGIC = np.float32(12582912)
_SIX_BITS = np.float32(63)
_LOWEST = np.float32(-32)  # code of Q6_K
_LEAST_SIZE = np.float32(1e-15)  # groups without a larger element are zero


@inner
def _nearest(value: Any) -> Any:
    bits = bits_of(np.float32(value + _MAGIC)) & np.uint32(0x7FFFFF)
    return np.int32(bits) - np.int32(0x400000)


@inner
def _between(code: Any, lowest: Any, highest: Any) -> Any:
    return np.int32(min(max(code, lowest), highest))


@inner
def _search_above_minimum(x: Any, state: Any, kind: Any, scales: Any, minima: Any) -> None:
    """Find scale and minimum of 16 groups of 32 elements; their codes take the place of x."""
    top = 15 if kind == Q4_K else 31
    first = np.float32(-1) if kind == Q4_K else np.float32(-0.5)
    steps = 20 if kind == Q4_K else 15
    at, lines = x.ctypes.data, state.ctypes.data
    best_error, best_inverse = np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    best_least, is_flat = np.empty(LANES, np.float32), np.empty(LANES, np.bool_)
    squares(at, lines, SIZE, top)
    for lane in range(LANES):
        state[MEAN, lane] = np.sqrt(np.float32(state[SQUARES, lane] / np.float32(SIZE)))
    extent(at, lines, SIZE, top)
    for lane in range(LANES):
        least, most = state[LEAST, lane], state[MOST, lane]
        least = _ZERO if least > _ZERO else least
        is_flat[lane] = most == least
        inverse = np.float32(np.float32(top) / np.float32(most - least))
        state[LEAST, lane] = state[MINIMUM, lane] = best_least[lane] = least
        state[INVERSE, lane] = best_inverse[lane] = inverse
        state[SCALE, lane] = scales[lane] = np.float32(_ONE / inverse)
    error(at, lines, SIZE, top)
    for lane in range(LANES):
        best_error[lane] = state[ERROR, lane]
    for step in range(steps + 1):
        for lane in range(LANES):
            span = np.float32(state[MOST, lane] - state[LEAST, lane])
            levels = np.float32(np.float32(first + np.float32(_TENTH * np.float32(step))) + top)
            state[INVERSE, lane] = np.float32(levels / span)
        code_sums(at, lines, SIZE, top)
        for lane in range(LANES):
            _fit(state, lane)
        error(at, lines, SIZE, top)
        for lane in range(LANES):
            if _is_solvable(state, lane) and state[ERROR, lane] < best_error[lane]:
                best_error[lane] = state[ERROR, lane]
                best_inverse[lane], best_least[lane] = state[INVERSE, lane], state[LEAST, lane]
                scales[lane], state[LEAST, lane] = state[SCALE, lane], state[MINIMUM, lane]
    for lane in range(LANES):
        minima[lane] = -state[LEAST, lane]
        state[INVERSE, lane], state[LEAST, lane] = best_inverse[lane], best_least[lane]
        if is_flat[lane]:
            scales[lane] = state[INVERSE, lane] = _ZERO
    codes(at, lines, SIZE, top)


@inner
def _determinant(state: Any, lane: Any) -> Any:
    product = np.float32(state[SUM_W, lane] * state[SUM_L2, lane])
    return np.float32(product - np.float32(state[SUM_L, lane] * state[SUM_L, lane]))


@inner
def _is_solvable(state: Any, lane: Any) -> Any:
    return _determinant(state, lane) > _ZERO


@inner
def _fit(state: Any, lane: Any) -> None:
    """Set the scale and the minimum with the least weighted squares, for the codes as they are."""
    sum_w, sum_x = state[SUM_W, lane], state[SUM_X, lane]
    sum_l, sum_l2, sum_xl = state[SUM_L, lane], state[SUM_L2, lane], state[SUM_XL, lane]
    determinant = _determinant(state, lane)
    scale = np.float32(np.float32(sum_w * sum_xl) - np.float32(sum_x * sum_l))
    minimum = np.float32(np.float32(sum_l2 * sum_x) - np.float32(sum_l * sum_xl))
    scale, minimum = np.float32(scale / determinant), np.float32(minimum / determinant)
    is_above = minimum > _ZERO
    state[SCALE, lane] = np.float32(sum_xl / sum_l2) if is_above else scale
    state[MINIMUM, lane] = _ZERO if is_above else minimum


@inner
def _search_signed(x: Any, state: Any, scales: Any) -> None:
    """Find the scales of 16 groups of 16 elements; their codes take the place of x."""
    top = 31
    at, lines = x.ctypes.data, state.ctypes.data
    best, best_inverse = np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    farthest(at, lines, _SMALL, top)
    for lane in range(LANES):
        state[INVERSE, lane] = best_inverse[lane] = np.float32(np.float32(-32) / state[MOST, lane])
    signed_sums(at, lines, _SMALL, top)
    for lane in range(LANES):
        sum_xl, sum_l2 = state[SUM_XL, lane], state[SUM_L2, lane]
        scales[lane] = np.float32(sum_xl / sum_l2) if sum_l2 != _ZERO else _ZERO
        best[lane] = np.float32(scales[lane] * sum_xl)
    for step in range(-9, 10):
        if step == 0:
            continue
        levels = -np.float32(np.float32(32) + np.float32(_TENTH * np.float32(step)))
        for lane in range(LANES):
            state[INVERSE, lane] = np.float32(levels / state[MOST, lane])
        signed_sums(at, lines, _SMALL, top)
        for lane in range(LANES):
            sum_xl, sum_l2 = state[SUM_XL, lane], state[SUM_L2, lane]
            gained = np.float32(sum_xl * sum_xl) > np.float32(best[lane] * sum_l2)
            if sum_l2 > _ZERO and gained:
                scales[lane] = np.float32(sum_xl / sum_l2)
                best[lane] = np.float32(scales[lane] * sum_xl)
                best_inverse[lane] = state[INVERSE, lane]
    for lane in range(LANES):
        state[INVERSE, lane] = best_inverse[lane]
        if state[LEAST, lane] < _LEAST_SIZE:
            scales[lane] = _ZERO
    signed_codes(at, lines, _SMALL, top)
    for lane in range(LANES):
        if state[LEAST, lane] < _LEAST_SIZE:
            x[:_SMALL, lane] = _LOWEST  # as llama.cpp leaves them


@inner
def _to_lanes(part: Any, size: Any, x: Any) -> None:
    """Put groups side by side: element i of group g at x[i, g]; zeros where there is no group."""
    for lane in range(LANES):
        for index in range(size):
            at = lane * size + index
            x[index, lane] = part[at] if at < part.size else _ZERO


@inner
def _encode_q45_k(
    kind: Any, part: Any, x: Any, first: Any, scales: Any, minima: Any, chosen: Any, out: Any
) -> None:
    """Encode a block whose groups are lanes from the first on."""
    groups, top = SUPER // SIZE, np.int32(15 if kind == Q4_K else 31)
    most, farthest_minimum = _ZERO, _ZERO
    for group in range(groups):
        most = max(most, scales[first + group])
        farthest_minimum = max(farthest_minimum, minima[first + group])
    to_scale = np.float32(_SIX_BITS / most) if most > _ZERO else _ZERO
    to_minimum = np.float32(_SIX_BITS / farthest_minimum) if farthest_minimum > _ZERO else _ZERO
    scale = store_half(np.float32(most / _SIX_BITS), out, 0)
    step = store_half(np.float32(farthest_minimum / _SIX_BITS), out, 2)
    packed = out[4:16]
    packed[:] = np.uint8(0)
    for group in range(groups):
        lane = first + group
        own = np.uint8(min(np.uint8(_nearest(to_scale * scales[lane]) & 255), np.uint8(63)))
        below = np.uint8(min(np.uint8(_nearest(to_minimum * minima[lane]) & 255), np.uint8(63)))
        _pack_six_bits(packed, group, own, below)
        unit = np.float32(scale * np.float32(own))
        offset = np.float32(step * np.float32(below))
        for k in range(SIZE):
            at = group * SIZE + k
            if unit == _ZERO:
                chosen[at] = np.uint8(np.int32(x[k, lane]))
            else:
                steps = np.float32(np.float32(part[at] + offset) / unit)
                chosen[at] = np.uint8(_between(_nearest(steps), np.int32(0), top))
    _pack_q45_k(kind, chosen, out)


@inner
def _pack_six_bits(packed: Any, group: Any, scale: Any, minimum: Any) -> None:
    """Put two numbers of six bits where decoders of Q4_K and Q5_K find them."""
    if group < 4:
        packed[group], packed[group + 4] = scale, minimum
        return
    low = (scale & np.uint8(15)) | np.uint8((minimum & np.uint8(15)) << np.uint8(4))
    packed[group + 4] = np.uint8(low)
    packed[group - 4] |= np.uint8((scale >> np.uint8(4)) << np.uint8(6))
    packed[group] |= np.uint8((minimum >> np.uint8(4)) << np.uint8(6))


@inner
def _pack_q45_k(kind: Any, chosen: Any, out: Any) -> None:
    first = 16 if kind == Q4_K else 16 + SIZE
    if kind == Q5_K:
        for k in range(SIZE):
            fifth = np.uint32(0)
            for group in range(SUPER // SIZE):
                bit = np.uint32(chosen[group * SIZE + k] >> np.uint8(4))
                fifth |= np.uint32(bit << np.uint32(group))
            out[16 + k] = np.uint8(fifth)
    for pair in range(SUPER // (2 * SIZE)):
        for k in range(SIZE):
            low = chosen[2 * pair * SIZE + k] & np.uint8(15)
            high = chosen[(2 * pair + 1) * SIZE + k] & np.uint8(15)
            out[first + pair * SIZE + k] = np.uint8(low | np.uint8(high << np.uint8(4)))


@inner
def _encode_q6_k(part: Any, x: Any, scales: Any, chosen: Any, out: Any) -> None:
    """Encode a block whose groups are the lanes."""
    most, size = _ZERO, _ZERO
    for group in range(LANES):
        if np.float32(abs(scales[group])) > size:
            most, size = scales[group], np.float32(abs(scales[group]))
    if size < _LEAST_SIZE:
        out[:] = np.uint8(0)
        return
    inverse = np.float32(np.float32(-128) / most)
    scale = store_half(np.float32(_ONE / inverse), out, 208)
    for group in range(LANES):
        own = min(_nearest(inverse * scales[group]), np.int32(127))
        out[192 + group] = np.uint8(own & 255)
        unit = np.float32(scale * np.float32(own))
        for k in range(_SMALL):
            at = group * _SMALL + k
            code = np.int32(x[k, group])
            if unit != _ZERO:
                nearest = _nearest(np.float32(part[at] / unit))
                code = _between(nearest, np.int32(-32), np.int32(31))
            chosen[at] = np.uint8(code + np.int32(32))
    for half in range(2):
        for k in range(SIZE):
            high = np.uint32(0)
            for quarter in range(4):
                top = np.uint32(chosen[half * 128 + quarter * SIZE + k] >> np.uint8(4))
                high |= np.uint32(top << np.uint32(2 * quarter))
            out[128 + half * SIZE + k] = np.uint8(high)
            for side in range(2):
                at = half * 128 + side * SIZE + k
                low, above = chosen[at] & np.uint8(15), chosen[at + 64] & np.uint8(15)
                out[half * 64 + side * SIZE + k] = np.uint8(low | np.uint8(above << np.uint8(4)))


@inner
def _encode(kind: Any, parts: Any, work: Any, out: Any, block_bytes: Any) -> None:
    """Encode one block of Q6_K, or one or two of the others."""
    x, state, scales, minima, chosen = work
    _to_lanes(parts, _SMALL if kind == Q6_K else SIZE, x)
    if kind == Q6_K:
        _search_signed(x, state, scales)
        _encode_q6_k(parts, x, scales, chosen, out)
        return
    _search_above_minimum(x, state, kind, scales, minima)
    for block in range(parts.size // SUPER):
        part = parts[block * SUPER : (block + 1) * SUPER]
        own = out[block * block_bytes : (block + 1) * block_bytes]
        _encode_q45_k(kind, part, x, block * (SUPER // SIZE), scales, minima, chosen, own)


@compiled
def encode_k_rows(
    kind: Any,
    source: Any,
    block_scale: Any,
    packed: Any,
    signal: Any,
    error: Any,
    max_error: Any,
) -> None:
    """Encode rows as ggml_encoded.encode_rows does."""
    weights, restored = np.empty(source.shape[1], np.float32), np.empty(SUPER, np.float32)
    work = (
        np.empty((SIZE, LANES), np.float32),
        np.empty((STATE_LINES, LANES), np.float32),
        np.empty(LANES, np.float32),
        np.empty(LANES, np.float32),
        np.empty(SUPER, np.uint8),
    )
    lanes, errors = np.empty(SEGMENT), np.empty(SEGMENT)
    at_once = SUPER if kind == Q6_K else 2 * SUPER
    block_bytes = packed.shape[1] // (weights.size // SUPER)
    for row in range(source.shape[0]):
        load_row(source, block_scale, row, weights)
        lanes[:] = 0.0
        errors[:] = 0.0
        biggest = np.uint32(0)
        for first in range(0, weights.size, at_once):
            prefetch(source, row + 1, first)
            parts = weights[first : first + at_once]
            at = first // SUPER * block_bytes
            out = packed[row, at : at + parts.size // SUPER * block_bytes]
            _encode(kind, parts, work, out, block_bytes)
            for block in range(parts.size // SUPER):
                own = out[block * block_bytes : (block + 1) * block_bytes]
                if kind == Q6_K:
                    decode_q6_k(own, restored)
                else:
                    decode_q45_k(own, kind == Q5_K, restored)
                for start in range(0, SUPER, SEGMENT):
                    stored = parts[block * SUPER + start : block * SUPER + start + SEGMENT]
                    kept = restored[start : start + SEGMENT]
                    biggest = add_errors(stored, kept, lanes, errors, biggest)
        end_row(row, lanes, errors, biggest, (signal, error, max_error))
