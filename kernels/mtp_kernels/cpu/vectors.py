"""Products of a few rows, written for vector registers: the building blocks of compiled kernels.

Every result is one chain of fused multiply-adds in a fixed order, whatever other rows are computed
beside it, so that a row's bits never depend on its batch. Vectors of 16 floats are one AVX-512
register; LLVM splits them for narrower machines. Addresses and strides are int64, the latter in
entries. Packed weights are float32, or bf16 in memory alone: a product expands them in registers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from mtp_kernels.cpu.jit import inner

LANES = 16
PANEL = 2 * LANES  # columns of a packed weight that one product makes
BLOCK = 4 * LANES  # entries that block_max and block_sum take
AHEAD = 16  # rows of a weight that are asked for before they are needed

_FLOAT = ir.FloatType()
_INT = ir.IntType(64)
_VECTOR = ir.VectorType(_FLOAT, LANES)
_PAIRS = ir.VectorType(ir.IntType(32), LANES)
_FLOAT_BYTES = 4
_LINE_BYTES = 64  # of a cache


def _int(value: int) -> Any:
    return ir.Constant(_INT, value)


def _load(builder: Any, address: Any, kind: Any) -> Any:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=_FLOAT_BYTES)


def _store(builder: Any, value: Any, address: Any) -> None:
    pointer = builder.inttoptr(address, value.type.as_pointer())
    builder.store(value, pointer, align=_FLOAT_BYTES)


def _at(builder: Any, base: Any, stride_bytes: Any, index: int, columns: int = 0) -> Any:
    """base + index * stride + columns floats."""
    moved = builder.add(base, builder.mul(stride_bytes, _int(index)))
    return builder.add(moved, _int(columns * _FLOAT_BYTES))


def _bytes(builder: Any, floats: Any) -> Any:
    return builder.mul(floats, _int(_FLOAT_BYTES))


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32")
    return builder.call(function, [a, b, c])


def _prefetch(builder: Any, address: Any) -> None:
    """Ask for the cache line at an address; one past the end of memory does no harm."""
    pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch")
    settings = [ir.Constant(number, value) for value in (0, 3, 1)]  # read, keep near, data
    builder.call(function, [builder.inttoptr(address, pointer), *settings])


def _splat(builder: Any, value: Any) -> Any:
    index = ir.Constant(ir.IntType(32), 0)
    first = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), value, index)
    mask = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
    return builder.shuffle_vector(first, ir.Constant(_VECTOR, ir.Undefined), mask)


def _fold(builder: Any, vectors: list[Any], combine: Any) -> Any:
    """A vector with one entry for each of 1, 2, 4, .. LANES vectors: its halves combined, again and
    again. Two vectors are folded in the registers of one: their entries lie in segments.
    """
    size = LANES
    while size > 1:
        pairs = [vectors[i : i + 2] for i in range(0, len(vectors), 2)]
        vectors = [combine(builder, *_halves(builder, pair, size)) for pair in pairs]
        size //= 2
    return vectors[0]


def _halves(builder: Any, vectors: list[Any], size: int) -> list[Any]:
    """The lower and the upper halves of all segments of `size` entries, of one or two vectors."""
    kind = vectors[0].type
    second = vectors[1] if len(vectors) == 2 else ir.Constant(kind, ir.Undefined)
    segments = range(0, len(vectors) * kind.count, size)
    halves = []
    for start in (0, size // 2):
        order = [at + start + i for at in segments for i in range(size // 2)]
        mask = ir.Constant(ir.VectorType(ir.IntType(32), len(order)), order)
        halves.append(builder.shuffle_vector(vectors[0], second, mask))
    return halves


def _entries(builder: Any, vector: Any, start: int, count: int) -> Any:
    """Some entries of a vector, as a shorter one."""
    order = ir.Constant(ir.VectorType(ir.IntType(32), count), list(range(start, start + count)))
    return builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), order)


def _sum(builder: Any, a: Any, b: Any) -> Any:
    return builder.fadd(a, b)


def _larger(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _loop(builder: Any, count: Any, starts: list[Any], step: Any) -> list[Any]:
    """`step(index, values) -> values` for index 0 to count - 1, count at least 1."""
    entry = builder.basic_block
    body = builder.append_basic_block("body")
    done = builder.append_basic_block("done")
    builder.branch(body)
    builder.position_at_end(body)
    index = builder.phi(_INT)
    index.add_incoming(_int(0), entry)
    values = [builder.phi(start.type) for start in starts]
    for value, start in zip(values, starts, strict=True):
        value.add_incoming(start, entry)
    results = step(index, values)
    following = builder.add(index, _int(1))
    index.add_incoming(following, body)
    for value, result in zip(values, results, strict=True):
        value.add_incoming(result, body)
    builder.cbranch(builder.icmp_signed("<", following, count), body, done)
    builder.position_at_end(done)
    return list(results)


def _float_columns(builder: Any, row: Any) -> list[Any]:
    """Both vectors of a panel's row."""
    return [_load(builder, builder.add(row, _int(c * _FLOAT_BYTES)), _VECTOR) for c in (0, LANES)]


def _bf16_columns(builder: Any, row: Any) -> list[Any]:
    """Both vectors of a panel's row, of which each 32-bit entry holds one number of either."""
    pairs = _load(builder, row, _PAIRS)
    shift, upper = (ir.Constant(_PAIRS, [value] * LANES) for value in (16, 0xFFFF0000))
    halves = builder.shl(pairs, shift), builder.and_(pairs, upper)
    return [builder.bitcast(half, _VECTOR) for half in halves]


def _product(rows: int) -> Any:
    """out[r, :PANEL] = sum over k of x[r, k] * w[k, :PANEL], k in order; added to if `add`.

    The type of `kind` is how w is stored.
    """

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, x_stride, w, w_stride, _, depth, out, out_stride, add = arguments
        size, columns_of = _STORED[signature.args[4]]
        x_bytes, out_bytes = (_bytes(builder, s) for s in (x_stride, out_stride))
        w_bytes = builder.mul(w_stride, _int(size))
        outs = [_at(builder, out, out_bytes, r, c) for r in range(rows) for c in (0, LANES)]
        zero = ir.Constant(_VECTOR, None)
        adds = builder.icmp_signed("!=", add, _int(0))
        starts = [builder.select(adds, _load(builder, at, _VECTOR), zero) for at in outs]

        def step(k: Any, sums: list[Any]) -> list[Any]:
            weight = builder.add(w, builder.mul(k, w_bytes))
            columns = columns_of(builder, weight)
            ahead = _at(builder, weight, w_bytes, AHEAD)
            for line in range(0, PANEL * size, _LINE_BYTES):
                _prefetch(builder, builder.add(ahead, _int(line)))
            offset = _bytes(builder, k)
            results = []
            for r in range(rows):
                entry = builder.add(_at(builder, x, x_bytes, r), offset)
                factor = _splat(builder, _load(builder, entry, _FLOAT))
                for c in (0, 1):
                    results.append(_fma(builder, factor, columns[c], sums[2 * r + c]))
            return results

        for value, at in zip(_loop(builder, depth, starts, step), outs, strict=True):
            _store(builder, value, at)
        return context.get_dummy_value()

    def product(
        typing: Any,
        x: Any,
        x_row: Any,
        w: Any,
        w_row: Any,
        kind: Any,
        depth: Any,
        out: Any,
        row: Any,
        add: Any,
    ) -> Any:
        return types.void(*[types.int64] * 4, kind, *[types.int64] * 4), codegen

    return intrinsic(product)


def _dots(rows: int, tokens: int) -> Any:
    """out[r, t] = sum over the first 16 * vectors entries of x[r] * y[t]."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, x_stride, y, y_stride, vectors, out, out_stride = arguments
        x_bytes, y_bytes, out_bytes = (_bytes(builder, s) for s in (x_stride, y_stride, out_stride))

        def step(index: Any, sums: list[Any]) -> list[Any]:
            offset = builder.mul(index, _int(LANES * _FLOAT_BYTES))
            left, right = (
                [_load(builder, builder.add(_at(builder, at, stride, i), offset), _VECTOR)
                 for i in range(count)]
                for at, stride, count in ((x, x_bytes, rows), (y, y_bytes, tokens))
            )  # fmt: skip
            for i in range(tokens if rows > 1 else 0):
                ahead = _at(builder, y, y_bytes, tokens + i)
                _prefetch(builder, builder.add(ahead, offset))
            pairs = [(a, b) for a in left for b in right]
            return [_fma(builder, a, b, s) for (a, b), s in zip(pairs, sums, strict=True)]

        starts = [ir.Constant(_VECTOR, None)] * (rows * tokens)
        sums = _fold(builder, _loop(builder, vectors, starts, step), _sum)
        for r in range(rows):
            line = _entries(builder, sums, r * tokens, tokens)
            _store(builder, line, _at(builder, out, out_bytes, r))
        return context.get_dummy_value()

    def dots(
        typing: Any,
        x: Any,
        x_stride: Any,
        y: Any,
        y_stride: Any,
        vectors: Any,
        out: Any,
        stride: Any,
    ) -> Any:
        return types.void(*[types.int64] * 7), codegen

    return intrinsic(dots)


def _block(combine: Any) -> Any:
    """BLOCK floats at an address, combined into one."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        parts = [
            _load(builder, builder.add(arguments[0], _int(at * _FLOAT_BYTES)), _VECTOR)
            for at in range(0, BLOCK, LANES)
        ]
        halves = [combine(builder, parts[i], parts[i + 1]) for i in (0, 2)]
        folded = _fold(builder, [combine(builder, *halves)], combine)
        return builder.extract_element(folded, ir.Constant(ir.IntType(32), 0))

    def block(typing: Any, address: Any) -> Any:
        return types.float32(types.int64), codegen

    return intrinsic(block)


# Bytes of an entry of a packed weight, and the code that reads a panel's row, by its kind.
_STORED = {types.float32: (_FLOAT_BYTES, _float_columns), types.uint16: (2, _bf16_columns)}

_PRODUCT_1, _PRODUCT_2, _PRODUCT_3, _PRODUCT_4 = (_product(rows) for rows in (1, 2, 3, 4))
_PRODUCT_5, _PRODUCT_6, _PRODUCT_7, _PRODUCT_8 = (_product(rows) for rows in (5, 6, 7, 8))
_DOTS_4_4, _DOTS_4_1, _DOTS_1_4, _DOTS_1_1 = (_dots(r, t) for r in (4, 1) for t in (4, 1))
block_max = _block(_larger)
block_sum = _block(_sum)


@intrinsic
def floats(typing: Any, address: Any) -> Any:
    """Return the address as a pointer for numba.carray."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], _FLOAT.as_pointer())

    return types.CPointer(types.float32)(types.int64), codegen


@intrinsic
def entry_bytes(typing: Any, kind: Any) -> Any:
    """Return the bytes of an entry of a packed weight of a kind."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _int(_STORED[signature.args[0]][0])

    return types.int64(kind), codegen


@inner
def address(array: Any) -> Any:
    """Return the address of an array's first entry."""
    return np.int64(array.ctypes.data)


class Rows(NamedTuple):
    """Rows of floats in memory: the address of the first, their stride in floats, their number."""

    at: Any
    stride: Any
    count: Any


class Panel(NamedTuple):
    """PANEL columns of a packed weight: their address, the number of rows, and their kind.

    kind is a zero of the stored type: float32, or uint16 for bf16, whose row holds its two vectors
    entry by entry.
    """

    at: Any
    count: Any
    kind: Any


@inner
def rows_of(array: Any) -> Any:
    """Return the rows of a C-contiguous array [rows, columns]."""
    return Rows(address(array), array.shape[1], array.shape[0])


@inner
def from_row(rows: Any, first: Any) -> Any:
    """Return the rows from `first` on."""
    return Rows(rows.at + _FLOAT_BYTES * first * rows.stride, rows.stride, rows.count - first)


@inner
def first_rows(rows: Any, count: Any) -> Any:
    """Return the first `count` rows."""
    return Rows(rows.at, rows.stride, count)


@inner
def multiply(x: Any, w: Any, out: Any, out_stride: Any, add: Any) -> None:
    """Write out[r, :PANEL] = sum over k of x[r, k] * w[k, :PANEL], added to out if `add` is not 0.

    x and w are Rows, the latter as many as x has columns; out is an address.
    """
    _multiply(x, w, np.float32(0), out, out_stride, add)


@inner
def multiply_panel(x: Any, panel: Any, out: Any, out_stride: Any) -> None:
    """Write out[r, :PANEL] = sum over k of x[r, k] * panel[k] for Rows x and a Panel."""
    _multiply(x, Rows(panel.at, PANEL, panel.count), panel.kind, out, out_stride, 0)


@inner
def _multiply(x: Any, w: Any, kind: Any, out: Any, out_stride: Any, add: Any) -> None:
    while x.count >= 8:
        _PRODUCT_8(x.at, x.stride, w.at, w.stride, kind, w.count, out, out_stride, add)
        x, out = from_row(x, 8), out + _FLOAT_BYTES * 8 * out_stride
    if x.count == 1:
        _PRODUCT_1(x.at, x.stride, w.at, w.stride, kind, w.count, out, out_stride, add)
    elif x.count == 2:
        _PRODUCT_2(x.at, x.stride, w.at, w.stride, kind, w.count, out, out_stride, add)
    elif x.count == 3:
        _PRODUCT_3(x.at, x.stride, w.at, w.stride, kind, w.count, out, out_stride, add)
    elif x.count == 4:
        _PRODUCT_4(x.at, x.stride, w.at, w.stride, kind, w.count, out, out_stride, add)
    elif x.count == 5:
        _PRODUCT_5(x.at, x.stride, w.at, w.stride, kind, w.count, out, out_stride, add)
    elif x.count == 6:
        _PRODUCT_6(x.at, x.stride, w.at, w.stride, kind, w.count, out, out_stride, add)
    elif x.count == 7:
        _PRODUCT_7(x.at, x.stride, w.at, w.stride, kind, w.count, out, out_stride, add)


@inner
def dot_rows(x: Any, y: Any, width: Any, out: Any, out_stride: Any) -> None:
    """Write out[r, t] = sum of x[r, :width] * y[t, :width] for Rows x and y; out is an address."""
    vectors = width // LANES
    done = 0 if vectors else y.count
    while done < y.count:
        step = 4 if y.count - done >= 4 else 1
        tokens = first_rows(from_row(y, done), step)
        _dot_tokens(x, tokens, vectors, out + _FLOAT_BYTES * done, out_stride)
        done += step
    if width % LANES:
        _add_remainders(x, y, width, out, out_stride)


@inner
def _dot_tokens(x: Any, y: Any, vectors: Any, out: Any, out_stride: Any) -> None:
    """Dot all rows of x with four rows of y or one, which stay in cache meanwhile."""
    while x.count >= 4:
        if y.count == 4:
            _DOTS_4_4(x.at, x.stride, y.at, y.stride, vectors, out, out_stride)
        else:
            _DOTS_4_1(x.at, x.stride, y.at, y.stride, vectors, out, out_stride)
        x, out = from_row(x, 4), out + _FLOAT_BYTES * 4 * out_stride
    while x.count >= 1:
        if y.count == 4:
            _DOTS_1_4(x.at, x.stride, y.at, y.stride, vectors, out, out_stride)
        else:
            _DOTS_1_1(x.at, x.stride, y.at, y.stride, vectors, out, out_stride)
        x, out = from_row(x, 1), out + _FLOAT_BYTES * out_stride


@inner
def _add_remainders(x: Any, y: Any, width: Any, out: Any, out_stride: Any) -> None:
    """Add the products of the entries past the last whole vector."""
    whole = width - width % LANES
    for r in range(x.count):
        left = carray(floats(x.at + _FLOAT_BYTES * r * x.stride), (width,))
        sums = carray(floats(out + _FLOAT_BYTES * r * out_stride), (y.count,))
        for t in range(y.count):
            right = carray(floats(y.at + _FLOAT_BYTES * t * y.stride), (width,))
            total = sums[t] if whole else np.float32(0.0)
            for c in range(whole, width):
                total += left[c] * right[c]
            sums[t] = total
