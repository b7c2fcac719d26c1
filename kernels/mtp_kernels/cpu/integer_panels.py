"""Products of 8-bit codes of inputs with panels of int8 or int4: sums of integers, which are exact,
scaled group by group.

Inputs are encoded row by row, in groups with a scale of their own: the largest number of a group
becomes 127. Codes of a weight are taken as unsigned ones, larger by an offset, since that is what
CPUs multiply; a group's sum starts at what this adds, the offset times its inputs, negated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from llvmlite import binding, ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic, register_jitable

from mtp_kernels.cpu.code import (
    FLOAT,
    FLOAT_BYTES,
    LANES,
    PAIRS,
    VECTOR,
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
from mtp_kernels.cpu.jit import inner
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
from mtp_kernels.cpu.panels import AHEAD
from mtp_kernels.cpu.vectors import address, bytes_at, float_of, floats, octets, words

GROUP = 128  # inputs that share a scale, at most, and never more than those of the weight
LARGEST = np.float32(127)
LEAST = np.float32(1e-30)  # groups of smaller numbers become zeros
_STEP_BYTES = 4 * PANEL
_INFINITY = np.uint32(0x7F800000)
_WORD = ir.IntType(32)
_BYTES = ir.VectorType(ir.IntType(8), 4 * LANES)
_TAKES_BYTES = (22, 0, 0)  # LLVM whose dot product takes bytes; before, words


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


def _words_of_int4(builder: Any, word: Any) -> list[Any]:
    """The even and the odd codes of words, as bytes."""
    codes, nibbles = builder.xor(word, every_word(0x88888888)), every_word(0x0F0F0F0F)
    odd = builder.lshr(codes, every_word(4))
    return [builder.and_(codes, nibbles), builder.and_(odd, nibbles)]


class _Stored(NamedTuple):
    """Code that takes words apart into four unsigned bytes each, and the rows of a step.

    prefetches: later rows are prefetched. On an AMD EPYC, one row of int8 takes 1.6 times as long
    so, since the CPU prefetches enough by itself, and four rows of int4 three quarters.
    """

    unsigned: Callable[[Any, Any], list[Any]]
    rows: int
    prefetches: bool


# How rows are stored, by the type of a product's `kind`.
_INT8, _INT4 = np.int8(0), np.int16(0)
_STORED = {
    types.int8: _Stored(_words_of_int8, STEP_ROWS[INT8], False),
    types.int16: _Stored(_words_of_int4, STEP_ROWS[INT4], True),
}


def _dot(builder: Any, total: Any, unsigned: Any, signed: Any) -> Any:
    """total + the sum of products of four bytes of each word."""
    if not binding.get_host_cpu_features().get("avx512vnni", False):
        return _plain_dot(builder, total, unsigned, signed)
    taken = _BYTES if binding.llvm_version_info >= _TAKES_BYTES else PAIRS
    kind = ir.FunctionType(PAIRS, [PAIRS, taken, taken])
    name = "llvm.x86.avx512.vpdpbusd.512"
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    given = [builder.bitcast(vector, taken) for vector in (unsigned, signed)]
    return builder.call(function, [total, *given])


def _plain_dot(builder: Any, total: Any, unsigned: Any, signed: Any) -> Any:
    """_dot without instructions of its own."""
    for byte in range(4):
        left = builder.and_(builder.lshr(unsigned, every_word(8 * byte)), every_word(0xFF))
        right = builder.ashr(builder.shl(signed, every_word(24 - 8 * byte)), every_word(24))
        total = builder.add(total, builder.mul(left, right))
    return total


class _Step(NamedTuple):
    """Code that multiplies a number of rows of a weight in one step of a loop."""

    rows: int
    code: Callable[[Any, list[Any]], list[Any]]


def _step(builder: Any, rows: int, kind: Any, x: Any, x_bytes: Any, w: Any) -> _Step:
    """Code that adds a step's products to the sums [rows, 2] of all rows."""
    stored = _STORED[kind]

    def step(number: Any, sums: list[Any]) -> list[Any]:
        at = builder.add(w, builder.mul(number, integer(_STEP_BYTES)))
        ahead = row_at(builder, at, integer(_STEP_BYTES), AHEAD)
        parts = []
        for c in (0, LANES):
            if stored.prefetches:
                prefetch(builder, builder.add(ahead, integer(c * FLOAT_BYTES)))
            word = load(builder, builder.add(at, integer(c * FLOAT_BYTES)), PAIRS)
            parts.append(stored.unsigned(builder, word))
        entry, sums = builder.add(x, builder.mul(number, integer(stored.rows))), [*sums]
        for k, columns in enumerate(zip(*parts, strict=True)):
            for r in range(rows):
                place = builder.add(row_at(builder, entry, x_bytes, r), integer(4 * k))
                codes = splat(builder, load(builder, place, _WORD))
                for c, column in enumerate(columns):
                    sums[2 * r + c] = _dot(builder, sums[2 * r + c], column, codes)
        return sums

    return _Step(stored.rows, step)


def _product(rows: int) -> Any:
    """out[r, :PANEL] = sum over k of x[r, k] * w[k, :PANEL] for Codes x and a Group w, times the
    scales of both; added to what is there but for the first group."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, w = (cgutils.unpack_tuple(builder, arguments[place]) for place in (0, 2))
        codes, scales, starts, depth, groups, _ = x
        step = _step(builder, rows, signature.args[1], codes, depth, w[0])
        stride, steps = bytes_of(builder, groups), builder.udiv(w[3], integer(step.rows))
        first = [
            splat(builder, load(builder, row_at(builder, starts, stride, r), _WORD))
            for r in range(rows)
        ]
        sums = loop(builder, steps, [start for start in first for _ in range(2)], step.code)
        factors = [
            splat(builder, load(builder, row_at(builder, scales, stride, r), FLOAT))
            for r in range(rows)
        ]
        adds = builder.icmp_signed("!=", w[2], integer(0))
        out_bytes = bytes_of(builder, arguments[4])
        for c in (0, 1):
            line = load(builder, row_at(builder, w[1], integer(0), 0, c * LANES), VECTOR)
            for r, factor in enumerate(factors):
                at = row_at(builder, arguments[3], out_bytes, r, c * LANES)
                old = builder.select(adds, load(builder, at, VECTOR), ir.Constant(VECTOR, None))
                made = builder.fmul(builder.sitofp(sums[2 * r + c], VECTOR), factor)
                store(builder, fma(builder, made, line, old), at)
        return context.get_dummy_value()

    def product(typing: Any, x: Any, kind: Any, w: Any, out: Any, stride: Any) -> Any:
        return types.void(x, kind, w, types.int64, types.int64), codegen

    return intrinsic(product)


_PRODUCT_1, _PRODUCT_2, _PRODUCT_4, _PRODUCT_8 = (_product(rows) for rows in (1, 2, 4, 8))


@inner
def multiply_codes(x: Any, panel: Any, out: Any, out_stride: Any) -> None:
    """Write out[r, :PANEL] = sum over k of x[r, k] * panel[k] for Codes x and a Panel."""
    form, kind = panel.form, kind_of(panel.form)
    first, number = 0, 0
    while first < panel.count:
        end = group_end(form, first, panel.count)
        scales = panel.at + first // group_of(form) * group_bytes(form)
        at = scales + SCALE_BYTES + first % group_of(form) * row_bytes(kind)
        weight = Group(at, scales, first, end - first, number)
        if kind == INT4:
            _multiply_group(x, _INT4, weight, out, out_stride)
        else:
            _multiply_group(x, _INT8, weight, out, out_stride)
        first, number = end, number + 1


@inner
def _multiply_group(x: Any, kind: Any, w: Any, out: Any, stride: Any) -> None:
    """Multiply a group of all rows, up to eight together."""
    row = 0
    while row < x.count:
        past, left = FLOAT_BYTES * (row * x.groups + w.number), x.count - row
        at = x.at + row * x.depth + w.first
        part = Codes(at, x.scales + past, x.starts + past, x.depth, x.groups, left)
        place = out + FLOAT_BYTES * row * stride
        if left >= 8:
            _PRODUCT_8(part, kind, w, place, stride)
            row += 8
        elif left >= 4:
            _PRODUCT_4(part, kind, w, place, stride)
            row += 4
        elif left >= 2:
            _PRODUCT_2(part, kind, w, place, stride)
            row += 2
        else:
            _PRODUCT_1(part, kind, w, place, stride)
            row += 1
