"""Codes and scales of groups as blocks of ggml that hold the same numbers.

Sources: `ggml/src/ggml-common.h` of llama.cpp; compressed-tensors' `pack-quantized` and
`mxfp4-pack-quantized`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mtp_kernels.quantize.layouts import OutOfRangeError

_ELEMENTS = 32  # of a block
_NAN = 255  # of e8m0


def carried_blocks(storage: str, source: str, codes: Any, scale: Any) -> Any:
    """Return blocks uint8 [n, bytes of a row] of a storage that holds a source's numbers.

    codes and scale are the bytes of rows [n, bytes] as the source stores them: two codes of int4 or
    e2m1 in one, or one of int8, integers larger by 8 or 128; scales of bf16 or e8m0. Raises
    OutOfRangeError for a scale that half precision does not hold exactly, ValueError for one that
    is no number.
    """
    numbers = codes if source == "int8_channel" else _nibbles(codes)
    numbers = numbers.reshape(len(codes), -1, _ELEMENTS)
    if source == "mxfp4_packed":
        if (scale == _NAN).any():
            raise ValueError("group scale: expected exponents below 255, found 255 (NaN)")
        scales = scale.reshape(*numbers.shape[:2], 1)
    else:
        scales = _halves(scale, numbers.shape[1])
    made = _CODES[storage](numbers, source)
    return np.concatenate([scales, made], axis=2).reshape(len(codes), -1)


def _nibbles(codes: Any) -> Any:
    """Codes of bytes [n, b] as [n, 2 b], the lower bits first."""
    return np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(codes), -1)


def _halves(scale: Any, blocks: int) -> Any:
    """Scales bf16 [n, 2 groups] as bytes of half precision, one of every block [n, blocks, 2]."""
    values = (scale.view("<u2").astype(np.uint32) << 16).view(np.float32)
    if not np.isfinite(values).all():
        raise ValueError("group scale: expected finite numbers, found others")
    with np.errstate(over="ignore"):
        halves = values.astype("<f2")
    wrong = halves.astype(np.float32) != values
    if wrong.any():
        raise OutOfRangeError(
            f"a scale of {values[wrong][0]:.3g}, which half precision does not hold exactly"
        )
    each = np.repeat(halves, blocks // halves.shape[1], axis=1)
    return np.ascontiguousarray(each[..., None]).view(np.uint8)


def _pairs(numbers: Any, source: str) -> Any:
    """Codes of four bits, the first half of a block in the lower bits."""
    half = _ELEMENTS // 2
    return numbers[..., :half] | numbers[..., half:] << 4


def _bytes(numbers: Any, source: str) -> Any:
    """Integers as int8; they are stored larger by half of what they have."""
    offset = 128 if source == "int8_channel" else 8
    return (numbers.astype(np.int16) - offset).astype(np.int8).view(np.uint8)


_CODES: dict[str, Callable[[Any, str], Any]] = {"q4_0": _pairs, "mxfp4": _pairs, "q8_0": _bytes}
