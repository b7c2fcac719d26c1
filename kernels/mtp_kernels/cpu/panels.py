"""Products with packed weights, written for vector registers: panels of 32 outputs.

Every result is one chain of fused multiply-adds in a fixed order, whatever other rows are computed
beside it, so that a row's bits never depend on its batch. A panel holds float32, bf16, or codes
with scales; a product expands them in registers. Which of them is known when they are multiplied,
not when they are compiled, so that code is compiled once for all.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.extending import intrinsic

from mtp_kernels.cpu.code import (
    FLOAT_BYTES,
    LANES,
    VECTOR,
    by_count,
    bytes_of,
    fma,
    integer,
    load,
    loop,
    prefetch,
    row_at,
    splat,
    store,
)
from mtp_kernels.cpu.group_sums import (
    WHOLE,
    add_minimums,
    add_scaled,
    expand,
    old_or_zeros,
    scales_at,
)
from mtp_kernels.cpu.jit import inner
from mtp_kernels.cpu.panel_forms import (
    BF16,
    E2M1,
    FLOAT32,
    INT4,
    INT8,
    PANEL,
    SCALE_BYTES,
    group_bytes,
    group_of,
    has_nibbles,
    head_bytes,
    kind_of,
)
from mtp_kernels.cpu.stored_rows import (
    OF_E2M1,
    OF_FLOATS,
    OF_FP8,
    OF_INT4,
    OF_INT8,
    OF_PAIRS,
    STORED,
    StoredRows,
)
from mtp_kernels.cpu.vectors import Rows, address, from_column

AHEAD = 32  # steps before which rows of a weight are asked for

_LINE_BYTES = 64  # of a cache
_WORD = ir.IntType(32)
# Rows whose sums stay in registers: of AVX-512, with both columns of a panel; AVX2 has 16 of half
# the size, for more than three rows one column after the other.
_HAS_WIDE = bool(binding.get_host_cpu_features().get("avx512f", False))
_MOST_ROWS, _MOST_WHOLE = (8, 8) if _HAS_WIDE else (6, 3)
BY_TWOS = [1 << power for power in range(_MOST_ROWS.bit_length())]  # rows of pairs of bf16
_MOST_PAIRED = 4 if _HAS_WIDE else 1  # rows of which those of two panels do
# AVX2 multiplies more rows with codes that are expanded once, so many rows of them at a time; with
# AVX-512 it is faster to expand them again for every few rows than to load what was expanded.
_MOST_EXPANDING = 1 << 62 if _HAS_WIDE else 2 * _MOST_ROWS
_EXPANDED = 128


class Panels(NamedTuple):
    """Addresses of panels, the columns that are read of each, and the bytes of a step."""

    at: list[Any]
    columns: tuple[int, ...]
    step_bytes: Any


def _step(builder: Any, stored: StoredRows, x: Any, x_bytes: Any, w: Panels) -> Any:
    """Code that adds a step's products to the sums of all rows, each with those of every column."""

    def step(number: Any, sums: list[Any]) -> list[Any]:
        read = []
        for panel in w.at:
            weight = builder.add(panel, builder.mul(number, w.step_bytes))
            ahead = row_at(builder, weight, w.step_bytes, AHEAD)
            for line in range(0, stored.bytes, _LINE_BYTES):
                prefetch(builder, builder.add(ahead, integer(line)))
            read += [stored.read(builder, weight, column) for column in w.columns]
        entry = builder.add(x, builder.mul(number, integer(stored.words * FLOAT_BYTES)))
        sums, width = [*sums], len(read)
        for k, vectors in enumerate(zip(*read, strict=True)):
            for r in range(len(sums) // width):
                at = builder.add(row_at(builder, entry, x_bytes, r), integer(k * FLOAT_BYTES))
                inputs = splat(builder, load(builder, at, _WORD))
                for c, vector in enumerate(vectors):
                    own = width * r + c
                    sums[own] = stored.added(builder, inputs, vector, sums[own])
        return sums

    return step


class _Given(NamedTuple):
    """Arguments of a product: addresses of inputs and outputs, their strides in floats, the number
    of inputs, and whether outputs are added to."""

    x: Any
    x_stride: Any
    depth: Any
    out: Any
    out_stride: Any
    add: Any


def _write_products(
    builder: Any, stored: StoredRows, given: _Given, w: Panels, scales: list[Any], rows: int
) -> None:
    """Code that multiplies a number of rows with panels, whose scales are at addresses."""
    x_bytes, out_bytes = (bytes_of(builder, s) for s in (given.x_stride, given.out_stride))
    adds = builder.icmp_signed("!=", given.add, integer(0))
    columns = [PANEL * panel + LANES * c for panel in range(len(w.at)) for c in w.columns]
    outs = [row_at(builder, given.out, out_bytes, r, c) for r in range(rows) for c in columns]
    starts = [ir.Constant(VECTOR, None)] * len(outs)
    if not stored.has_scales:
        starts = old_or_zeros(builder, outs, adds)
    step = _step(builder, stored, given.x, x_bytes, w)
    sums = loop(builder, builder.udiv(given.depth, integer(stored.rows)), starts, step)
    if stored.has_scales:
        places = [
            builder.add(at, integer(c * LANES * FLOAT_BYTES)) for at in scales for c in w.columns
        ]
        lines = scales_at(builder, stored.factor, places) * rows
        old = old_or_zeros(builder, outs, adds)
        sums = [fma(builder, *each) for each in zip(sums, lines, old, strict=True)]
    for value, at in zip(sums, outs, strict=True):
        store(builder, value, at)


@intrinsic
def product(
    typing: Any,
    x: Any,
    x_row: Any,
    rows: Any,
    w: Any,
    w_row: Any,
    kind: Any,
    scales: Any,
    depth: Any,
    out: Any,
    row: Any,
    add: Any,
) -> Any:
    """out[r, :PANEL] = sum over k of x[r, k] * w[k, :PANEL], k in order, for 1 to _MOST_ROWS rows,
    of pairs of bf16 for those of BY_TWOS; added to if `add`.

    The type of `kind` is how w is stored; of codes, the sum is multiplied by the scales.
    """

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, x_row, rows, w, w_row, _, scales, depth, out, row, add = arguments
        stored, given = STORED[signature.args[5]], _Given(x, x_row, depth, out, row, add)
        size = integer(stored.bytes)
        if stored.rows == 1:  # rows of floats may lie in a wider matrix
            size = builder.mul(w_row, integer(stored.bytes // PANEL))

        def code(count: int) -> None:
            for columns in (WHOLE,) if count <= _MOST_WHOLE else ((0,), (1,)):
                panels = Panels([w], columns, size)
                _write_products(builder, stored, given, panels, [scales], count)

        counts = BY_TWOS if stored.paired else range(1, _MOST_ROWS + 1)
        by_count(builder, rows, counts, code)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5, kind, *[types.int64] * 5), codegen


@intrinsic
def _pair_product(
    typing: Any,
    x: Any,
    x_row: Any,
    rows: Any,
    first: Any,
    second: Any,
    kind: Any,
    depth: Any,
    out: Any,
    row: Any,
    add: Any,
) -> Any:
    """out[r, :2 * PANEL] = x[r] times a group of integers of two panels, times their scales, for
    1 to _MOST_PAIRED rows; added to if `add`. The type of `kind` is how they are stored."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, x_row, rows, first, second, _, depth, out, row, add = arguments
        stored, given = STORED[signature.args[5]], _Given(x, x_row, depth, out, row, add)
        scales = [first, second]
        codes = [builder.add(at, integer(SCALE_BYTES)) for at in scales]
        panels = Panels(codes, WHOLE, integer(stored.bytes))
        code = partial(_write_products, builder, stored, given, panels, scales)
        by_count(builder, rows, range(1, _MOST_PAIRED + 1), code)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5, kind, *[types.int64] * 4), codegen


@inner
def multiply(x: Any, w: Any, out: Any, out_stride: Any, add: Any) -> None:
    """Write out[r, :PANEL] = sum over k of x[r, k] * w[k, :PANEL], added to out if `add` is not 0.

    x and w are Rows of floats, the latter as many as x has columns; out is an address.
    """
    _multiply(x, w, OF_FLOATS, 0, out, out_stride, add)


@inner
def multiply_panel(x: Any, panel: Any, out: Any, out_stride: Any) -> None:
    """Write out[r, :PANEL] = sum over k of x[r, k] * panel[k] for Rows x and a Panel."""
    kind, weight = kind_of(panel.form), Rows(panel.at, PANEL, panel.count)
    if kind == FLOAT32:
        _multiply(x, weight, OF_FLOATS, 0, out, out_stride, 0)
    elif kind == BF16:
        _multiply(x, weight, OF_PAIRS, 0, out, out_stride, 0)
    else:
        _multiply_groups(x, panel, kind, out, out_stride)


@inner
def goes_in_pairs(x: Any, form: Any) -> Any:
    """Return True for Rows x and a form whose panels are multiplied two at a time: the sums of few
    rows and one panel of integers wait for each other longer than for memory."""
    kind = kind_of(form)
    return x.count <= _MOST_PAIRED and (kind == INT8 or has_nibbles(kind))


@inner
def multiply_pair(x: Any, panel: Any, following: Any, out: Any, out_stride: Any) -> None:
    """Write Rows x times a Panel of integers and the one at the address `following` to
    out[r, :2 * PANEL]; with the bits of one at a time."""
    group, size = group_of(panel.form), group_bytes(panel.form)
    before = head_bytes(panel.form) - SCALE_BYTES
    first, second = panel.at + before, following + before
    for start in range(0, panel.count, group):
        depth = min(group, panel.count - start)
        at = x.at + FLOAT_BYTES * start
        given = at, x.stride, x.count, first, second
        if kind_of(panel.form) == INT4:
            _pair_product(*given, OF_INT4, depth, out, out_stride, start)
        elif kind_of(panel.form) == INT8:
            _pair_product(*given, OF_INT8, depth, out, out_stride, start)
        else:
            _pair_product(*given, OF_E2M1, depth, out, out_stride, start)
        for row in range(x.count if before else 0):
            entry, own = at + FLOAT_BYTES * row * x.stride, out + FLOAT_BYTES * row * out_stride
            add_minimums(entry, depth, first - before, own)
            add_minimums(entry, depth, second - before, own + FLOAT_BYTES * PANEL)
        first, second = first + size, second + size


@inner
def _multiply_groups(x: Any, panel: Any, kind: Any, out: Any, out_stride: Any) -> None:
    """Multiply with the codes of one group after the other, each sum times the group's scales;
    minimums are multiplied with the sum of a group's inputs."""
    group, size = group_of(panel.form), group_bytes(panel.form)
    before = head_bytes(panel.form) - SCALE_BYTES
    at = panel.at + before
    for first in range(0, panel.count, group):
        part = from_column(x, first)
        codes = Rows(at + SCALE_BYTES, PANEL, min(group, panel.count - first))
        if kind == INT4:
            _multiply_group(part, codes, OF_INT4, at, out, out_stride, first)
        elif kind == E2M1:
            _multiply_group(part, codes, OF_E2M1, at, out, out_stride, first)
        elif kind == INT8:
            _multiply_group(part, codes, OF_INT8, at, out, out_stride, first)
        else:
            _multiply_group(part, codes, OF_FP8, at, out, out_stride, first)
        for row in range(x.count if before else 0):
            own = FLOAT_BYTES * row
            add_minimums(part.at + own * x.stride, codes.count, at - before, out + own * out_stride)
        at += size


@inner
def _multiply_group(
    x: Any, codes: Any, kind: Any, scales: Any, out: Any, stride: Any, add: Any
) -> None:
    """Multiply with a group of codes, expanded once where they are read several times."""
    if x.count <= _MOST_EXPANDING:
        _multiply(x, codes, kind, scales, out, stride, add)
        return
    numbers = np.empty((min(codes.count, _EXPANDED), PANEL), np.float32)
    sums = np.empty((x.count, PANEL), np.float32)
    for first in range(0, codes.count, _EXPANDED):
        count = min(codes.count - first, _EXPANDED)
        expand(codes.at, kind, first, count, address(numbers))
        part, expanded = from_column(x, first), Rows(address(numbers), PANEL, count)
        _multiply(part, expanded, OF_FLOATS, 0, address(sums), PANEL, first)
    for row in range(x.count):
        add_scaled(address(sums[row]), kind, scales, out + FLOAT_BYTES * row * stride, add)


@inner
def _multiply(x: Any, w: Any, kind: Any, scales: Any, out: Any, stride: Any, add: Any) -> None:
    for row in range(0, x.count, _MOST_ROWS):
        at, rows = x.at + FLOAT_BYTES * row * x.stride, min(x.count - row, _MOST_ROWS)
        own = out + FLOAT_BYTES * row * stride
        product(at, x.stride, rows, w.at, w.stride, kind, scales, w.count, own, stride, add)
