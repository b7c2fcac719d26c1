"""Products of 8-bit codes of inputs with panels of int8 or int4: sums of integers, which are exact,
scaled group by group.

Inputs are encoded row by row, in groups with a scale of their own: the largest number of a group
becomes 127. Codes of a weight are taken as unsigned ones, larger by an offset, since that is what
CPUs multiply; a group's sum starts at what this adds, the offset times its inputs, negated.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic, register_jitable

from mtp_kernels.cpu.byte_dots import HAS_DOTS, add_dots
from mtp_kernels.cpu.code import (
    FLOAT,
    FLOAT_BYTES,
    LANES,
    PAIRS,
    VECTOR,
    by_count,
    bytes_of,
    every_word,
    fma,
    integer,
    load,
    loop,
    prefetch,
    row_at,
    splat,
    store,
)
from mtp_kernels.cpu.group_sums import WHOLE, old_or_zeros
from mtp_kernels.cpu.jit import inner
from mtp_kernels.cpu.matrix_units import HAS_TILES, ROW_BYTES, TILE
from mtp_kernels.cpu.nibbles import int4_bytes
from mtp_kernels.cpu.panel_forms import (
    INT4,
    INT8,
    PANEL,
    SCALE_BYTES,
    STEP_ROWS,
    group_bytes,
    group_of,
    kind_of,
    row_bytes,
)
from mtp_kernels.cpu.panels import AHEAD, Panels
from mtp_kernels.cpu.tile_products import (
    TileRows,
    TileWeight,
    area,
    expand_int4,
    multiply_whole_tiles,
)
from mtp_kernels.cpu.vectors import address, bytes_at, float_of, floats, octets, words

GROUP = 128  # inputs that share a scale, at most, and never more than those of the weight
LARGEST = np.float32(127)
LEAST = np.float32(1e-30)  # groups of smaller numbers become zeros
_STEP_BYTES = 4 * PANEL
_INFINITY = np.uint32(0x7F800000)
_WORD = ir.IntType(32)
# Rows whose sums stay in registers, and of these, those with both columns of a panel.
_MOST_ROWS, _MOST_WHOLE = (8, 8) if HAS_DOTS else (4, 2)


class Codes(NamedTuple):
    """Encoded rows: addresses of codes [count, depth], scales and starts [count, groups]."""

    at: Any
    scales: Any
    starts: Any
    depth: Any
    groups: Any
    count: Any


class Group(NamedTuple):
    """Rows of a weight that are multiplied with one group of inputs: addresses of codes and scales,
    the first row, their number, and the number of the group."""

    at: Any
    scales: Any
    first: Any
    size: Any
    number: Any


@register_jitable
def group_end(form: int, first: int, depth: int) -> int:
    """Return where the group of inputs ends that begins with one of `depth` inputs."""
    group = group_of(form)
    return min(first + GROUP, (first // group + 1) * group, depth)


@register_jitable
def groups_in(form: int, depth: int) -> int:
    """Return the number of groups of a row of inputs."""
    first, groups = 0, 0
    while first < depth:
        first, groups = group_end(form, first, depth), groups + 1
    return groups


@inner
def encode_rows(x: Any, weight: Any, codes: Any, scales: Any, starts: Any) -> Any:
    """Encode Rows x for products with a weight, given as a Panel of it, in arrays
    codes [count, depth], scales and starts [count, groups]."""
    form, depth = weight.form, weight.count
    offset = 8 if kind_of(form) == INT4 else 128
    for r in range(x.count):
        first, group = 0, 0
        while first < depth:
            end = group_end(form, first, depth)
            at = x.at + FLOAT_BYTES * (r * x.stride + first)
            out = address(codes) + r * depth + first
            scales[r, group], total = _encode_group(at, end - first, out)
            starts[r, group] = -offset * total
            if kind_of(form) == INT4:
                _part_even_and_odd(out, (end - first) // 8)
            first, group = end, group + 1
    return Codes(address(codes), address(scales), address(starts), depth, scales.shape[1], x.count)


@inner
def _encode_group(at: Any, size: Any, out: Any) -> Any:
    """Write the codes of `size` numbers; return their scale, NaN where a number is not finite, and
    the sum of the codes."""
    numbers, bits, codes = (
        carray(floats(at), (size,)),
        carray(words(at), (size,)),
        carray(bytes_at(out), (size,)),
    )
    most = np.uint32(0)
    for k in range(size):
        most = max(most, np.uint32(bits[k] & np.uint32(0x7FFFFFFF)))
    largest, scale, factor = float_of(np.uint32(most)), np.float32(0.0), np.float32(0.0)
    if most >= _INFINITY:
        scale = np.float32(np.nan)
    elif largest > LEAST:
        scale, factor = largest / LARGEST, LARGEST / largest
    total = np.int32(0)
    for k in range(size):
        code = np.int32(np.rint(numbers[k] * factor))
        codes[k] = np.int8(code)
        total += code
    return scale, total


@inner
def _part_even_and_odd(at: Any, count: Any) -> None:
    """Put the even ones of every eight codes before the odd ones, as a weight of int4 has them."""
    lines = carray(octets(at), (count,))
    for line in range(count):
        both = lines[line]
        lines[line] = _even_bytes(both) | _even_bytes(both >> np.uint64(8)) << np.uint64(32)


@inner
def _even_bytes(line: Any) -> Any:
    """Return bytes 0, 2, 4, 6 of eight as the lowest four."""
    line &= np.uint64(0x00FF00FF00FF00FF)
    line = (line | line >> np.uint64(8)) & np.uint64(0x0000FFFF0000FFFF)
    return (line | line >> np.uint64(16)) & np.uint64(0xFFFFFFFF)


def _words_of_int8(builder: Any, word: Any) -> list[Any]:
    return [builder.xor(word, every_word(0x80808080))]


class _Stored(NamedTuple):
    """Code that takes words apart into four unsigned bytes each, and the rows of a step.

    small: the bytes are below 16. prefetches: later rows are prefetched. On an AMD EPYC, one row of
    int8 takes 1.6 times as long so, since the CPU prefetches enough by itself, and four rows of
    int4 three quarters.
    """

    unsigned: Callable[[Any, Any], list[Any]]
    rows: int
    small: bool
    prefetches: bool


# How rows are stored, by the type of a product's `kind`.
_INT8, _INT4 = np.int8(0), np.int16(0)
_STORED = {
    types.int8: _Stored(_words_of_int8, STEP_ROWS[INT8], small=False, prefetches=False),
    types.int16: _Stored(int4_bytes, STEP_ROWS[INT4], small=True, prefetches=True),
}


def _step(builder: Any, stored: _Stored, rows: int, x: Any, w: Panels) -> Any:
    """Code that adds a step's products to the sums of all rows, each with those of every column."""
    codes, x_bytes = x

    def step(number: Any, sums: list[Any]) -> list[Any]:
        at = builder.add(w.at[0], builder.mul(number, w.step_bytes))
        ahead = row_at(builder, at, w.step_bytes, AHEAD)
        columns = []
        for column in w.columns:
            place = integer(column * LANES * FLOAT_BYTES)
            if stored.prefetches:
                prefetch(builder, builder.add(ahead, place))
            columns.append(stored.unsigned(builder, load(builder, builder.add(at, place), PAIRS)))
        entry, sums = builder.add(codes, builder.mul(number, integer(stored.rows))), [*sums]
        for r in range(rows):
            places = [
                builder.add(row_at(builder, entry, x_bytes, r), integer(4 * k))
                for k in range(len(columns[0]))
            ]
            signed = [splat(builder, load(builder, place, _WORD)) for place in places]
            for c, unsigned in enumerate(columns):
                own = len(columns) * r + c
                sums[own] = add_dots(builder, sums[own], unsigned, signed, small=stored.small)
        return sums

    return step


def _rows_product(builder: Any, stored: _Stored, given: Any, rows: int) -> None:
    """Code of _product for a number of rows."""
    x, w = (cgutils.unpack_tuple(builder, given[place]) for place in (0, 3))
    codes, scales, starts, depth, groups, _ = x
    stride, steps = bytes_of(builder, groups), builder.udiv(w[3], integer(stored.rows))
    adds, out_bytes = builder.icmp_signed("!=", w[2], integer(0)), bytes_of(builder, given[5])
    first, factors = (
        [splat(builder, load(builder, row_at(builder, at, stride, r), kind)) for r in range(rows)]
        for at, kind in ((starts, _WORD), (scales, FLOAT))
    )
    for columns in (WHOLE,) if rows <= _MOST_WHOLE else ((0,), (1,)):
        panels = Panels([w[0]], columns, integer(_STEP_BYTES))
        step = _step(builder, stored, rows, (codes, depth), panels)
        sums = loop(builder, steps, [start for start in first for _ in columns], step)
        for c, column in enumerate(columns):
            line = load(builder, row_at(builder, w[1], integer(0), 0, column * LANES), VECTOR)
            for r, factor in enumerate(factors):
                at = row_at(builder, given[4], out_bytes, r, column * LANES)
                (old,) = old_or_zeros(builder, [at], adds)
                made = builder.fmul(builder.sitofp(sums[len(columns) * r + c], VECTOR), factor)
                store(builder, fma(builder, made, line, old), at)


@intrinsic
def _product(typing: Any, x: Any, rows: Any, kind: Any, w: Any, out: Any, stride: Any) -> Any:
    """out[r, :PANEL] = sum over k of x[r, k] * w[k, :PANEL] for Codes x and a Group w, times the
    scales of both, for 1, 2, 4, .. _MOST_ROWS rows; added to what is there but for the first group.
    """

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        counts = [1 << power for power in range(_MOST_ROWS.bit_length())]
        stored = _STORED[signature.args[2]]
        by_count(builder, arguments[1], counts, partial(_rows_product, builder, stored, arguments))
        return context.get_dummy_value()

    return types.void(x, types.int64, kind, w, types.int64, types.int64), codegen


@inner
def multiply_codes(x: Any, panel: Any, out: Any, out_stride: Any) -> None:
    """Write out[r, :PANEL] = sum over k of x[r, k] * panel[k] for Codes x and a Panel."""
    form, kind = panel.form, kind_of(panel.form)
    first, number = 0, 0
    while first < panel.count:
        end = group_end(form, first, panel.count)
        scales = panel.at + first // group_of(form) * group_bytes(form)
        at = scales + SCALE_BYTES + first % group_of(form) * row_bytes(kind)
        weight, done = Group(at, scales, first, end - first, number), 0
        if HAS_TILES:
            done = _multiply_tiles(x, kind, weight, out, out_stride)
        if kind == INT4:
            _multiply_group(x, done, _INT4, weight, out, out_stride)
        else:
            _multiply_group(x, done, _INT8, weight, out, out_stride)
        first, number = end, number + 1


@inner
def _multiply_tiles(x: Any, kind: Any, w: Any, out: Any, stride: Any) -> Any:
    """Multiply a group of whole tiles of rows on matrix units; return the number of these rows."""
    if x.count < TILE or w.size % ROW_BYTES:
        return 0
    at = w.at
    if kind == INT4:
        at = area()
        expand_int4(w.at, w.size, at)
    factors = x.scales + FLOAT_BYTES * w.number
    rows = TileRows(x.at + w.first, x.depth, factors, FLOAT_BYTES * x.groups)
    part = TileWeight(at, w.size // ROW_BYTES, w.scales)
    return multiply_whole_tiles(rows, x.count, _INT8, part, out, stride, w.first)


@inner
def _multiply_group(x: Any, row: Any, kind: Any, w: Any, out: Any, stride: Any) -> None:
    """Multiply a group of all rows from one on, up to _MOST_ROWS together."""
    rows = _MOST_ROWS
    while row < x.count:
        past, left = FLOAT_BYTES * (row * x.groups + w.number), x.count - row
        at = x.at + row * x.depth + w.first
        part = Codes(at, x.scales + past, x.starts + past, x.depth, x.groups, left)
        while rows > left:
            rows //= 2
        _product(part, rows, kind, w, out + FLOAT_BYTES * row * stride, stride)
        row += rows
