"""Compiled decoders of ggml's blocks, those of 32 elements and the K-quants, of 256."""

from __future__ import annotations

from typing import Any

import numpy as np

from mtp_kernels.cpu.jit import compiled, inner
from mtp_kernels.quantize.cpu_numbers import magnitude_bits
from mtp_kernels.quantize.ggml_encoded import e2m1_halves, half_of_bytes, half_of_e8m0
from mtp_kernels.quantize.ggml_vectors import MXFP4, Q4_0, Q4_1, Q5_0, Q8_0, SIZE

Q4_K, Q5_K, Q6_K = range(6, 9)
HALF = SIZE // 2
SUPER = 256  # elements of a block of K-quants
_SCALES = 12  # bytes of its 16 numbers of six bits
_INFINITY = np.uint32(0x7F800000)


@inner
def _int8(byte: Any) -> Any:
    """Return a byte of two's complement as fp32."""
    return np.float32(np.int32(byte ^ np.uint8(0x80)) - np.int32(128))


@inner
def _decode_q8_0(block: Any, out: Any) -> None:
    scale = half_of_bytes(block, 0)
    for k in range(SIZE):
        out[k] = np.float32(scale * _int8(block[2 + k]))


@inner
def _decode_nibbles(block: Any, first: Any, fifth: Any, codes: Any) -> None:
    """Read the codes of 32 elements, the fifth bits of which begin at a byte; at 0, none do."""
    for j in range(HALF):
        codes[j] = block[first + j] & np.uint8(15)
        codes[j + HALF] = block[first + j] >> np.uint8(4)
    if fifth > 0:
        for k in range(SIZE):
            bit = np.uint8(block[fifth + k // 8] >> np.uint8(k % 8)) & np.uint8(1)
            codes[k] = np.uint8(codes[k] | np.uint8(bit << np.uint8(4)))


@inner
def _decode_small(kind: Any, block: Any, codes: Any, out: Any) -> None:
    """Decode Q4_0, Q5_0, Q4_1 and Q5_1."""
    scale = half_of_bytes(block, 0)
    if kind in (Q4_0, Q5_0):
        offset = np.int32(8 if kind == Q4_0 else 16)
        _decode_nibbles(block, 2 if kind == Q4_0 else 6, 0 if kind == Q4_0 else 2, codes)
        for k in range(SIZE):
            out[k] = np.float32(scale * np.float32(np.int32(codes[k]) - offset))
        return
    minimum = half_of_bytes(block, 2)
    _decode_nibbles(block, 4 if kind == Q4_1 else 8, 0 if kind == Q4_1 else 4, codes)
    for k in range(SIZE):
        out[k] = np.float32(np.float32(scale * np.float32(codes[k])) + minimum)


@inner
def _decode_mxfp4(block: Any, codes: Any, out: Any) -> None:
    unit = half_of_e8m0(block[0])
    _decode_nibbles(block, 1, 0, codes)
    for k in range(SIZE):
        out[k] = np.float32(unit * e2m1_halves(codes[k]))


@inner
def _scale_and_minimum(scales: Any, group: Any) -> Any:
    """Return the two numbers of six bits of a group of 32 elements: the first four groups' lie in
    the low bits of eight bytes, whose high bits complete the others'."""
    if group < 4:
        return np.float32(scales[group] & np.uint8(63)), np.float32(
            scales[group + 4] & np.uint8(63)
        )
    both = scales[group + 4]
    scale = np.uint8(both & np.uint8(15)) | np.uint8((scales[group - 4] >> 2) & 0x30)
    minimum = np.uint8(both >> np.uint8(4)) | np.uint8((scales[group] >> 2) & 0x30)
    return np.float32(np.uint8(scale)), np.float32(np.uint8(minimum))


@inner
def decode_q45_k(block: Any, has_fifth: Any, out: Any) -> None:
    scale, least = half_of_bytes(block, 0), half_of_bytes(block, 2)
    scales = block[4 : 4 + _SCALES]
    first = 4 + _SCALES
    codes = first + (SIZE if has_fifth else 0)
    for group in range(SUPER // SIZE):
        step, below = _scale_and_minimum(scales, group)
        own, minimum = np.float32(scale * step), np.float32(least * below)
        shift = np.uint8(4 * (group % 2))
        for k in range(SIZE):
            code = (block[codes + group // 2 * SIZE + k] >> shift) & np.uint8(15)
            if has_fifth:
                bit = (block[first + k] >> np.uint8(group)) & np.uint8(1)
                code = np.uint8(code | np.uint8(bit << np.uint8(4)))
            value = np.float32(own * np.float32(np.uint8(code)))
            out[group * SIZE + k] = np.float32(value - minimum)


@inner
def decode_q6_k(block: Any, out: Any) -> None:
    scale = half_of_bytes(block, 208)
    for group in range(SUPER // SIZE):
        half, quarter = group // 4, group % 4
        low = half * 64 + (quarter % 2) * SIZE
        high = 128 + half * SIZE
        for k in range(SIZE):
            nibble = (block[low + k] >> np.uint8(4 * (quarter // 2))) & np.uint8(15)
            top = (block[high + k] >> np.uint8(2 * quarter)) & np.uint8(3)
            code = np.int32(np.uint8(nibble | np.uint8(top << np.uint8(4)))) - np.int32(32)
            own = np.float32(scale * _int8(block[192 + (group * SIZE + k) // 16]))
            out[group * SIZE + k] = np.float32(own * np.float32(code))


@inner
def _is_finite(values: Any) -> Any:
    largest = np.uint32(0)
    for k in range(values.size):
        largest = max(largest, magnitude_bits(values[k]))
    return largest < _INFINITY


@compiled
def decode_rows(kind: Any, packed: Any, block_bytes: Any, out: Any) -> Any:
    """Decode rows; return whether every number is finite."""
    codes = np.empty(SIZE, np.uint8)
    size = SUPER if kind >= Q4_K else SIZE
    finite = True
    for row in range(packed.shape[0]):
        for index in range(packed.shape[1] // block_bytes):
            block = packed[row, index * block_bytes : (index + 1) * block_bytes]
            part = out[row, index * size : (index + 1) * size]
            if kind == Q8_0:
                _decode_q8_0(block, part)
            elif kind == MXFP4:
                _decode_mxfp4(block, codes, part)
            elif kind < MXFP4:
                _decode_small(kind, block, codes, part)
            elif kind == Q6_K:
                decode_q6_k(block, part)
            else:
                decode_q45_k(block, kind == Q5_K, part)
        finite = finite and _is_finite(out[row])
    return finite
