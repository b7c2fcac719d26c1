"""Products with packed weights, written for vector registers: panels of 32 outputs.

Every result is one chain of fused multiply-adds in a fixed order, whatever other rows are computed
beside it, so that a row's bits never depend on its batch. A panel holds float32, bf16, or codes
with scales; a product expands them in registers. Which of them is known when they are multiplied,
not when they are compiled, so that code is compiled once for all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from mtp_kernels.cpu.code import (
    FLOAT,
    FLOAT_BYTES,
    LANES,
    PAIRS,
    VECTOR,
    added,
    bytes_of,
    every_word,
    fma,
    fold,
    integer,
    load,
    loop,
    prefetch,
    row_at,
    splat,
    store,
    widened,
)
from mtp_kernels.cpu.jit import inner
from mtp_kernels.cpu.nibbles import E2M1_FACTOR, e2m1_numbers, int4_numbers
from mtp_kernels.cpu.panel_forms import (
    BF16,
    E2M1,
    FLOAT32,
    FP8,
    INT4,
    INT8,
    PANEL,
    SCALE_BYTES,
    STEP_ROWS,
    group_bytes,
    group_of,
    has_nibbles,
    head_bytes,
    kind_of,
)
from mtp_kernels.cpu.vectors import Rows, from_row

AHEAD = 16  # steps before which rows of a weight are asked for

_LINE_BYTES = 64  # of a cache
_BYTES = ir.VectorType(ir.IntType(8), LANES)
_E4M3_BITS = 0x87F00000  # sign, exponent and mantissa where float32 has them
_E4M3_FACTOR = 2.0**120  # between the biases of both exponents


Columns = list[tuple[Any, Any]]  # both vectors of each row


@dataclass(frozen=True)
class _Stored:
    """Code that reads rows of a kind, `rows` in one step of `bytes` bytes.

    has_scales: the sums of products are multiplied by a factor, which is a power of two, and by
    scales.
    """

    rows: int
    bytes: int
    read: Callable[[Any, Any], Columns]
    has_scales: bool = True
    factor: float = 1.0


def _read_floats(builder: Any, at: Any) -> Columns:
    first, second = (
        load(builder, builder.add(at, integer(c * FLOAT_BYTES)), VECTOR) for c in (0, LANES)
    )
    return [(first, second)]


def _read_bf16(builder: Any, at: Any) -> Columns:
    return [widened(builder, load(builder, at, PAIRS))]


def _e4m3(builder: Any, codes: Any) -> Any:
    """Values of codes: the factor comes before any sum, which subnormal numbers would not bear."""
    bits = builder.and_(builder.shl(codes, every_word(20)), every_word(_E4M3_BITS))
    factor = ir.Constant(VECTOR, [_E4M3_FACTOR] * LANES)
    return builder.fmul(builder.bitcast(bits, VECTOR), factor)


def _read_int8(builder: Any, at: Any) -> Columns:
    """Read four rows, whose codes are the bytes of words, the first in the lowest bits."""
    words = _words(builder, at)
    columns = []
    for row in range(4):
        left = every_word(24 - 8 * row)
        moved = [builder.shl(word, left) if row < 3 else word for word in words]
        first, second = (
            builder.sitofp(builder.ashr(word, every_word(24)), VECTOR) for word in moved
        )
        columns.append((first, second))
    return columns


def _read_fp8(builder: Any, at: Any) -> Columns:
    """Read four rows of bytes."""
    columns = []
    for start in range(0, 4 * PANEL, PANEL):
        first, second = (
            builder.sext(load(builder, builder.add(at, integer(start + half)), _BYTES), PAIRS)
            for half in (0, LANES)
        )
        columns.append((_e4m3(builder, first), _e4m3(builder, second)))
    return columns


def _words(builder: Any, at: Any) -> list[Any]:
    return [load(builder, builder.add(at, integer(c * FLOAT_BYTES)), PAIRS) for c in (0, LANES)]


def _read_nibbles(numbers: Callable[[Any, Any], list[Any]], builder: Any, at: Any) -> Columns:
    """Read eight rows, whose codes are the nibbles of words, the first in the lowest bits."""
    first, second = (numbers(builder, word) for word in _words(builder, at))
    return list(zip(first, second, strict=True))


# How rows are stored, by the type of a product's argument `kind`.
_FLOATS, _PAIRS, _INT8, _FP8, _INT4, _E2M1 = (
    np.float32(0), np.uint16(0), np.int8(0), np.uint8(0), np.int16(0), np.uint32(0)
)  # fmt: skip
_STORED = {
    types.float32: _Stored(1, 4 * PANEL, _read_floats, has_scales=False),
    types.uint16: _Stored(1, 2 * PANEL, _read_bf16, has_scales=False),
    types.int8: _Stored(STEP_ROWS[INT8], 4 * PANEL, _read_int8),
    types.uint8: _Stored(STEP_ROWS[FP8], 4 * PANEL, _read_fp8),
    types.int16: _Stored(STEP_ROWS[INT4], 4 * PANEL, partial(_read_nibbles, int4_numbers)),
    types.uint32: _Stored(
        STEP_ROWS[E2M1], 4 * PANEL, partial(_read_nibbles, e2m1_numbers), factor=E2M1_FACTOR
    ),
}


def _scaled(
    builder: Any, factor: float, sums: list[Any], scales: list[Any], old: list[Any]
) -> list[Any]:
    """Sums times a factor and scales, added to what was there."""
    if factor != 1:
        sums = [builder.fmul(made, ir.Constant(VECTOR, [factor] * LANES)) for made in sums]
    return [fma(builder, *each) for each in zip(sums, scales, old, strict=True)]


def _step(
    builder: Any, stored: _Stored, x: Any, x_bytes: Any, panels: list[Any], w_bytes: Any
) -> Any:
    """Code that adds a step's products to the sums of all rows, each with those of every panel."""

    def step(number: Any, sums: list[Any]) -> list[Any]:
        read = []
        for w in panels:
            weight = builder.add(w, builder.mul(number, w_bytes))
            ahead = row_at(builder, weight, w_bytes, AHEAD)
            for line in range(0, stored.bytes, _LINE_BYTES):
                prefetch(builder, builder.add(ahead, integer(line)))
            read.append(stored.read(builder, weight))
        entry = builder.add(x, builder.mul(number, integer(stored.rows * FLOAT_BYTES)))
        sums, width = [*sums], 2 * len(panels)
        for k, pairs in enumerate(zip(*read, strict=True)):
            columns = [vector for pair in pairs for vector in pair]
            for r in range(len(sums) // width):
                at = builder.add(row_at(builder, entry, x_bytes, r), integer(k * FLOAT_BYTES))
                factor = splat(builder, load(builder, at, FLOAT))
                for c, column in enumerate(columns):
                    sums[width * r + c] = fma(builder, factor, column, sums[width * r + c])
        return sums

    return step


def _product(rows: int) -> Any:
    """out[r, :PANEL] = sum over k of x[r, k] * w[k, :PANEL], k in order; added to if `add`.

    The type of `kind` is how w is stored; of codes, the sum is multiplied by the scales.
    """

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, x_stride, w, w_stride, _, scales, depth, out, out_stride, add = arguments
        stored = _STORED[signature.args[4]]
        x_bytes, out_bytes = (bytes_of(builder, s) for s in (x_stride, out_stride))
        w_bytes = integer(stored.bytes)
        if stored.rows == 1:  # rows of floats may lie in a wider matrix
            w_bytes = builder.mul(w_stride, integer(stored.bytes // PANEL))
        outs = [row_at(builder, out, out_bytes, r, c) for r in range(rows) for c in (0, LANES)]
        zero = ir.Constant(VECTOR, None)
        adds = builder.icmp_signed("!=", add, integer(0))

        def before() -> list[Any]:
            return [builder.select(adds, load(builder, at, VECTOR), zero) for at in outs]

        starts = [zero] * len(outs) if stored.has_scales else before()
        steps = builder.udiv(depth, integer(stored.rows))
        step = _step(builder, stored, x, x_bytes, [w], w_bytes)
        sums = loop(builder, steps, starts, step)
        if stored.has_scales:
            lines = [
                load(builder, row_at(builder, scales, integer(0), 0, c), VECTOR) for c in (0, LANES)
            ]
            sums = _scaled(builder, stored.factor, sums, lines * rows, before())
        for value, at in zip(sums, outs, strict=True):
            store(builder, value, at)
        return context.get_dummy_value()

    def product(
        typing: Any,
        x: Any,
        x_row: Any,
        w: Any,
        w_row: Any,
        kind: Any,
        scales: Any,
        depth: Any,
        out: Any,
        row: Any,
        add: Any,
    ) -> Any:
        return types.void(*[types.int64] * 4, kind, *[types.int64] * 5), codegen

    return intrinsic(product)


def _pair_product() -> Any:
    """out[:2 * PANEL] = x times a group of nibbles of two panels, times their scales; added to if
    `add`. The type of `kind` is how they are stored."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, first, second, _, depth, out, add = arguments
        stored, zero = _STORED[signature.args[3]], ir.Constant(VECTOR, None)
        adds = builder.icmp_signed("!=", add, integer(0))
        codes = [builder.add(at, integer(SCALE_BYTES)) for at in (first, second)]
        step = _step(builder, stored, x, integer(0), codes, integer(stored.bytes))
        sums = loop(builder, builder.udiv(depth, integer(stored.rows)), [zero] * 4, step)
        lines = [
            load(builder, builder.add(at, integer(c * FLOAT_BYTES)), VECTOR)
            for at in (first, second)
            for c in (0, LANES)
        ]
        outs = [builder.add(out, integer(at * LANES * FLOAT_BYTES)) for at in range(len(sums))]
        old = [builder.select(adds, load(builder, at, VECTOR), zero) for at in outs]
        made = _scaled(builder, stored.factor, sums, lines, old)
        for value, at in zip(made, outs, strict=True):
            store(builder, value, at)
        return context.get_dummy_value()

    def product(
        typing: Any, x: Any, first: Any, second: Any, kind: Any, depth: Any, out: Any, add: Any
    ) -> Any:
        return types.void(*[types.int64] * 3, kind, *[types.int64] * 3), codegen

    return intrinsic(product)


def _add_minimums(typing: Any, x: Any, depth: Any, minimums: Any, out: Any) -> Any:
    """out[:PANEL] += minimums[:PANEL] times the sum of x[:depth], a multiple of LANES."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, depth, minimums, out = arguments

        def step(number: Any, sums: list[Any]) -> list[Any]:
            at = builder.add(x, builder.mul(number, integer(LANES * FLOAT_BYTES)))
            return [builder.fadd(sums[0], load(builder, at, VECTOR))]

        steps = builder.udiv(depth, integer(LANES))
        folded = fold(builder, loop(builder, steps, [ir.Constant(VECTOR, None)], step), added)
        first = builder.extract_element(folded, ir.Constant(ir.IntType(32), 0))
        total = splat(builder, first)
        for c in (0, LANES):
            least, at = (builder.add(a, integer(c * FLOAT_BYTES)) for a in (minimums, out))
            old = load(builder, at, VECTOR)
            store(builder, fma(builder, total, load(builder, least, VECTOR), old), at)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen


_PAIR_PRODUCT, _ADD_MINIMUMS = _pair_product(), intrinsic(_add_minimums)
_PRODUCT_1, _PRODUCT_2, _PRODUCT_3, _PRODUCT_4 = (_product(rows) for rows in (1, 2, 3, 4))
_PRODUCT_5, _PRODUCT_6, _PRODUCT_7, _PRODUCT_8 = (_product(rows) for rows in (5, 6, 7, 8))


@inner
def multiply(x: Any, w: Any, out: Any, out_stride: Any, add: Any) -> None:
    """Write out[r, :PANEL] = sum over k of x[r, k] * w[k, :PANEL], added to out if `add` is not 0.

    x and w are Rows of floats, the latter as many as x has columns; out is an address.
    """
    _multiply(x, w, _FLOATS, 0, out, out_stride, add)


@inner
def multiply_panel(x: Any, panel: Any, out: Any, out_stride: Any) -> None:
    """Write out[r, :PANEL] = sum over k of x[r, k] * panel[k] for Rows x and a Panel."""
    kind, weight = kind_of(panel.form), Rows(panel.at, PANEL, panel.count)
    if kind == FLOAT32:
        _multiply(x, weight, _FLOATS, 0, out, out_stride, 0)
    elif kind == BF16:
        _multiply(x, weight, _PAIRS, 0, out, out_stride, 0)
    else:
        _multiply_groups(x, panel, kind, out, out_stride)


@inner
def goes_in_pairs(x: Any, form: Any) -> Any:
    """Return True for Rows x and a form whose panels are multiplied two at a time: the sums of one
    row and one panel of nibbles wait for each other longer than for memory."""
    return x.count == 1 and has_nibbles(kind_of(form))


@inner
def multiply_pair(x: Any, panel: Any, following: Any, out: Any) -> None:
    """Write x [k] times a Panel of nibbles and the one at the address `following` to out
    [2 * PANEL]; with the bits of one at a time."""
    group, size = group_of(panel.form), group_bytes(panel.form)
    before = head_bytes(panel.form) - SCALE_BYTES
    first, second = panel.at + before, following + before
    for start in range(0, panel.count, group):
        depth = min(group, panel.count - start)
        entry = x.at + FLOAT_BYTES * start
        if kind_of(panel.form) == INT4:
            _PAIR_PRODUCT(entry, first, second, _INT4, depth, out, start)
        else:
            _PAIR_PRODUCT(entry, first, second, _E2M1, depth, out, start)
        if before:
            _ADD_MINIMUMS(entry, depth, first - before, out)
            _ADD_MINIMUMS(entry, depth, second - before, out + FLOAT_BYTES * PANEL)
        first, second = first + size, second + size


@inner
def _multiply_groups(x: Any, panel: Any, kind: Any, out: Any, out_stride: Any) -> None:
    """Multiply with the codes of one group after the other, each sum times the group's scales;
    minimums are multiplied with the sum of a group's inputs."""
    group, size = group_of(panel.form), group_bytes(panel.form)
    before = head_bytes(panel.form) - SCALE_BYTES
    at = panel.at + before
    for first in range(0, panel.count, group):
        part = Rows(x.at + FLOAT_BYTES * first, x.stride, x.count)
        codes = Rows(at + SCALE_BYTES, PANEL, min(group, panel.count - first))
        if kind == INT4:
            _multiply(part, codes, _INT4, at, out, out_stride, first)
        elif kind == E2M1:
            _multiply(part, codes, _E2M1, at, out, out_stride, first)
        elif kind == INT8:
            _multiply(part, codes, _INT8, at, out, out_stride, first)
        else:
            _multiply(part, codes, _FP8, at, out, out_stride, first)
        for row in range(x.count if before else 0):
            own = FLOAT_BYTES * row
            _ADD_MINIMUMS(
                part.at + own * x.stride, codes.count, at - before, out + own * out_stride
            )
        at += size


@inner
def _multiply(x: Any, w: Any, kind: Any, scales: Any, out: Any, stride: Any, add: Any) -> None:
    while x.count >= 8:
        _PRODUCT_8(x.at, x.stride, w.at, w.stride, kind, scales, w.count, out, stride, add)
        x, out = from_row(x, 8), out + FLOAT_BYTES * 8 * stride
    if x.count == 1:
        _PRODUCT_1(x.at, x.stride, w.at, w.stride, kind, scales, w.count, out, stride, add)
    elif x.count == 2:
        _PRODUCT_2(x.at, x.stride, w.at, w.stride, kind, scales, w.count, out, stride, add)
    elif x.count == 3:
        _PRODUCT_3(x.at, x.stride, w.at, w.stride, kind, scales, w.count, out, stride, add)
    elif x.count == 4:
        _PRODUCT_4(x.at, x.stride, w.at, w.stride, kind, scales, w.count, out, stride, add)
    elif x.count == 5:
        _PRODUCT_5(x.at, x.stride, w.at, w.stride, kind, scales, w.count, out, stride, add)
    elif x.count == 6:
        _PRODUCT_6(x.at, x.stride, w.at, w.stride, kind, scales, w.count, out, stride, add)
    elif x.count == 7:
        _PRODUCT_7(x.at, x.stride, w.at, w.stride, kind, scales, w.count, out, stride, add)
