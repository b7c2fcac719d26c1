"""Rows of packed weights in vector registers, as they are stored: floats, bf16, or codes.

A panel has two vectors of columns, which are read apart from each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from mtp_kernels.cpu.bf16_dots import add_pairs, joined, lower_and_upper
from mtp_kernels.cpu.code import (
    FLOAT_BYTES,
    LANES,
    PAIRS,
    VECTOR,
    entries,
    every_word,
    fma,
    integer,
    load,
    widened,
)
from mtp_kernels.cpu.nibbles import E2M1_FACTOR, e2m1_numbers, int4_numbers, int4_pairs
from mtp_kernels.cpu.panel_forms import E2M1, FP8, INT4, INT8, PANEL, STEP_ROWS

_BYTES = ir.VectorType(ir.IntType(8), PANEL)
_E4M3_BITS = 0xBF80  # sign, exponent and mantissa where half precision has them
_E4M3_FACTOR = 2.0**8  # between the biases of both exponents

Column = list[Any]  # a vector of each row


@dataclass(frozen=True)
class StoredRows:
    """Code that reads a column of vectors, 0 or 1, of the `rows` of a step of `bytes` bytes.

    has_scales: the sums of products are multiplied by a factor, which is a power of two, and by
    scales. paired: vectors hold pairs of bf16, of row k of a step and the one half a step below.
    """

    rows: int
    bytes: int
    read: Callable[[Any, Any, int], Column]
    has_scales: bool = True
    factor: float = 1.0
    paired: bool = False

    @property
    def words(self) -> int:
        """The words of an input that a step takes."""
        return self.rows // 2 if self.paired else self.rows

    def added(self, builder: Any, inputs: Any, vector: Any, total: Any) -> Any:
        """Sums and the products of a vector with words of inputs."""
        if self.paired:
            return add_pairs(builder, inputs, vector, total)
        return fma(builder, builder.bitcast(inputs, VECTOR), vector, total)


def _half(builder: Any, at: Any, column: int, kind: Any) -> Any:
    """A column's vector of two that follow each other."""
    return load(builder, builder.add(at, integer(column * LANES * FLOAT_BYTES)), kind)


def _read_floats(builder: Any, at: Any, column: int) -> Column:
    return [_half(builder, at, column, VECTOR)]


def _read_bf16(builder: Any, at: Any, column: int) -> Column:
    return [widened(builder, load(builder, at, PAIRS))[column]]


def _e4m3(builder: Any, codes: Any, column: int) -> Any:
    """Numbers of a column's codes over _E4M3_FACTOR: as half precision they have the same bits
    elsewhere, which both columns' get together."""
    kind = ir.VectorType(ir.IntType(16), PANEL)
    shift, mask = (ir.Constant(kind, [number] * PANEL) for number in (7, _E4M3_BITS))
    bits = builder.and_(builder.shl(builder.sext(codes, kind), shift), mask)
    own = entries(builder, bits, column * LANES, LANES)
    return builder.fpext(builder.bitcast(own, ir.VectorType(ir.HalfType(), LANES)), VECTOR)


def _read_int8(builder: Any, at: Any, column: int) -> Column:
    """Read four rows, whose codes are the bytes of words, the first in the lowest bits."""
    word, top = _half(builder, at, column, PAIRS), every_word(24)
    moved = [builder.shl(word, every_word(24 - 8 * row)) if row < 3 else word for row in range(4)]
    return [builder.sitofp(builder.ashr(codes, top), VECTOR) for codes in moved]


def _read_fp8(builder: Any, at: Any, column: int) -> Column:
    """Read four rows of bytes."""
    places = [builder.add(at, integer(row * PANEL)) for row in range(STEP_ROWS[FP8])]
    return [_e4m3(builder, load(builder, place, _BYTES), column) for place in places]


def _read_nibbles(
    numbers: Callable[[Any, Any], Column], builder: Any, at: Any, column: int
) -> Column:
    """Read eight rows, whose codes are the nibbles of words, the first in the lowest bits."""
    return numbers(builder, _half(builder, at, column, PAIRS))


def _bf16_pairs(builder: Any, at: Any, column: int) -> Column:
    """Read two rows, whose words hold a number of each column."""
    places = at, builder.add(at, integer(2 * PANEL))
    first, second = (load(builder, place, PAIRS) for place in places)
    half = every_word(16)
    if column:
        return [lower_and_upper(builder, builder.lshr(first, half), second)]
    return [builder.or_(builder.and_(first, every_word(0xFFFF)), builder.shl(second, half))]


def _pairs_of(
    read: Callable[[Any, Any, int], Column], builder: Any, at: Any, column: int
) -> Column:
    """Read four rows as pairs of their numbers, which are bf16."""
    first, second, third, fourth = read(builder, at, column)
    return [joined(builder, first, third), joined(builder, second, fourth)]


# How rows are stored, by the type of a product's argument `kind`; one in a tuple: as pairs.
OF_FLOATS, OF_PAIRS, OF_INT8, OF_FP8, OF_INT4, OF_E2M1 = (
    np.float32(0), np.uint16(0), np.int8(0), np.uint8(0), np.int16(0), np.uint32(0)
)  # fmt: skip
STORED = {
    types.float32: StoredRows(1, 4 * PANEL, _read_floats, has_scales=False),
    types.uint16: StoredRows(1, 2 * PANEL, _read_bf16, has_scales=False),
    types.int8: StoredRows(STEP_ROWS[INT8], 4 * PANEL, _read_int8),
    types.uint8: StoredRows(STEP_ROWS[FP8], 4 * PANEL, _read_fp8, factor=_E4M3_FACTOR),
    types.int16: StoredRows(STEP_ROWS[INT4], 4 * PANEL, partial(_read_nibbles, int4_numbers)),
    types.uint32: StoredRows(
        STEP_ROWS[E2M1], 4 * PANEL, partial(_read_nibbles, e2m1_numbers), factor=E2M1_FACTOR
    ),
    types.UniTuple(types.uint16, 1): StoredRows(
        2, 4 * PANEL, _bf16_pairs, has_scales=False, paired=True
    ),
    types.UniTuple(types.int8, 1): StoredRows(
        STEP_ROWS[INT8], 4 * PANEL, partial(_pairs_of, _read_int8), paired=True
    ),
    types.UniTuple(types.uint8, 1): StoredRows(
        STEP_ROWS[FP8], 4 * PANEL, partial(_pairs_of, _read_fp8), factor=_E4M3_FACTOR, paired=True
    ),
    types.UniTuple(types.int16, 1): StoredRows(
        STEP_ROWS[INT4], 4 * PANEL, partial(_read_nibbles, int4_pairs), paired=True
    ),
}
