"""Products of a few rows, written for vector registers: the building blocks of compiled kernels.

Every result is one chain of fused multiply-adds in a fixed order, whatever other rows are computed
beside it, so that a row's bits never depend on its batch. Addresses and strides are int64, the
latter in entries.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import binding, ir
from numba import carray, types
from numba.extending import intrinsic

from mtp_kernels.cpu.code import (
    FLOAT,
    FLOAT_BYTES,
    INT,
    LANES,
    VECTOR,
    added,
    bytes_of,
    entries,
    fma,
    fold,
    integer,
    larger,
    load,
    loop,
    prefetch,
    row_at,
    store,
)
from mtp_kernels.cpu.jit import inner

BLOCK = 4 * LANES  # entries that block_max and block_sum take


def _dots(rows: int, tokens: int) -> Any:
    """out[r, t] = sum over the first 16 * vectors entries of x[r] * y[t]."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, x_stride, y, y_stride, vectors, out, out_stride = arguments
        x_bytes, y_bytes, out_bytes = (
            bytes_of(builder, s) for s in (x_stride, y_stride, out_stride)
        )

        def step(index: Any, sums: list[Any]) -> list[Any]:
            offset = builder.mul(index, integer(LANES * FLOAT_BYTES))
            left, right = (
                [load(builder, builder.add(row_at(builder, at, stride, i), offset), VECTOR)
                 for i in range(count)]
                for at, stride, count in ((x, x_bytes, rows), (y, y_bytes, tokens))
            )  # fmt: skip
            for i in range(tokens if rows > 1 else 0):
                ahead = row_at(builder, y, y_bytes, tokens + i)
                prefetch(builder, builder.add(ahead, offset))
            pairs = [(a, b) for a in left for b in right]
            return [fma(builder, a, b, s) for (a, b), s in zip(pairs, sums, strict=True)]

        starts = [ir.Constant(VECTOR, None)] * (rows * tokens)
        sums = fold(builder, loop(builder, vectors, starts, step), added)
        for r in range(rows):
            line = entries(builder, sums, r * tokens, tokens)
            store(builder, line, row_at(builder, out, out_bytes, r))
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
            load(builder, builder.add(arguments[0], integer(at * FLOAT_BYTES)), VECTOR)
            for at in range(0, BLOCK, LANES)
        ]
        halves = [combine(builder, parts[i], parts[i + 1]) for i in (0, 2)]
        folded = fold(builder, [combine(builder, *halves)], combine)
        return builder.extract_element(folded, ir.Constant(ir.IntType(32), 0))

    def block(typing: Any, address: Any) -> Any:
        return types.float32(types.int64), codegen

    return intrinsic(block)


# Rows and tokens whose sums stay in registers: AVX2 has 16 of half the size of AVX-512's.
_MANY = 4 if binding.get_host_cpu_features().get("avx512f", False) else 2
_DOTS, _ROWS_DOTS, _TOKENS_DOTS, _DOTS_1 = (_dots(r, t) for r in (_MANY, 1) for t in (_MANY, 1))
block_max = _block(larger)
block_sum = _block(added)


def _pointer(kind: Any, stored: Any) -> Any:
    """Return what gives an address as a pointer to numbers of a kind, for numba.carray."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], stored.as_pointer())

    def pointer(typing: Any, address: Any) -> Any:
        return types.CPointer(kind)(types.int64), codegen

    return intrinsic(pointer)


floats: Any = _pointer(types.float32, FLOAT)
integers: Any = _pointer(types.int64, INT)
words: Any = _pointer(types.uint32, ir.IntType(32))
halves: Any = _pointer(types.uint16, ir.IntType(16))
bytes_at: Any = _pointer(types.int8, ir.IntType(8))
octets: Any = _pointer(types.uint64, ir.IntType(64))


def _float_of(typing: Any, bits: Any) -> Any:
    """Return the float of 32 bits."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], FLOAT)

    return types.float32(types.uint32), codegen


float_of: Any = intrinsic(_float_of)


def _address(typing: Any, array: Any) -> Any:
    """Return the address of an array's first entry."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        made = context.make_array(signature.args[0])(context, builder, arguments[0])
        return builder.ptrtoint(made.data, INT)

    return types.int64(array), codegen


address: Any = intrinsic(_address)


class Rows(NamedTuple):
    """Rows of floats in memory: the address of the first, their stride in floats, their number."""

    at: Any
    stride: Any
    count: Any


@inner
def rows_of(array: Any) -> Any:
    """Return the rows of a C-contiguous array [rows, columns]."""
    return Rows(address(array), array.shape[1], array.shape[0])


@inner
def from_row(rows: Any, first: Any) -> Any:
    """Return the rows from `first` on."""
    return Rows(rows.at + FLOAT_BYTES * first * rows.stride, rows.stride, rows.count - first)


@inner
def from_column(rows: Any, first: Any) -> Any:
    """Return the rows from a column on."""
    return Rows(rows.at + FLOAT_BYTES * first, rows.stride, rows.count)


@inner
def first_rows(rows: Any, count: Any) -> Any:
    """Return the first `count` rows."""
    return Rows(rows.at, rows.stride, count)


@inner
def dot_rows(x: Any, y: Any, width: Any, out: Any, out_stride: Any) -> None:
    """Write out[r, t] = sum of x[r, :width] * y[t, :width] for Rows x and y; out is an address."""
    vectors = width // LANES
    done = 0 if vectors else y.count
    while done < y.count:
        step = _MANY if y.count - done >= _MANY else 1
        tokens = first_rows(from_row(y, done), step)
        _dot_tokens(x, tokens, vectors, out + FLOAT_BYTES * done, out_stride)
        done += step
    if width % LANES:
        _add_remainders(x, y, width, out, out_stride)


@inner
def dot_row(x: Any, y: Any, width: Any, out: Any) -> None:
    """Write the sum of x[:width] * y[:width], as dot_rows adds it; all three are addresses."""
    if width >= LANES:
        _DOTS_1(x, 0, y, 0, width // LANES, out, 1)
    if width % LANES:
        _add_remainders(Rows(x, 0, 1), Rows(y, 0, 1), width, out, 1)


@inner
def _dot_tokens(x: Any, y: Any, vectors: Any, out: Any, out_stride: Any) -> None:
    """Dot all rows of x with _MANY rows of y or one, which stay in cache meanwhile."""
    while x.count >= _MANY:
        if y.count == _MANY:
            _DOTS(x.at, x.stride, y.at, y.stride, vectors, out, out_stride)
        else:
            _ROWS_DOTS(x.at, x.stride, y.at, y.stride, vectors, out, out_stride)
        x, out = from_row(x, _MANY), out + FLOAT_BYTES * _MANY * out_stride
    while x.count >= 1:
        if y.count == _MANY:
            _TOKENS_DOTS(x.at, x.stride, y.at, y.stride, vectors, out, out_stride)
        else:
            _DOTS_1(x.at, x.stride, y.at, y.stride, vectors, out, out_stride)
        x, out = from_row(x, 1), out + FLOAT_BYTES * out_stride


@inner
def _add_remainders(x: Any, y: Any, width: Any, out: Any, out_stride: Any) -> None:
    """Add the products of the entries past the last whole vector."""
    whole = width - width % LANES
    for r in range(x.count):
        left = carray(floats(x.at + FLOAT_BYTES * r * x.stride), (width,))
        sums = carray(floats(out + FLOAT_BYTES * r * out_stride), (y.count,))
        for t in range(y.count):
            right = carray(floats(y.at + FLOAT_BYTES * t * y.stride), (width,))
            total = sums[t] if whole else np.float32(0.0)
            for c in range(whole, width):
                total += left[c] * right[c]
            sums[t] = total


def _without_owner(builder: Any, context: Any, kind: Any, value: Any) -> Any:
    if isinstance(kind, types.Array):
        array = context.make_array(kind)(context, builder, value)
        array.meminfo = ir.Constant(array.meminfo.type, None)
        array.parent = ir.Constant(array.parent.type, None)
        return array._getvalue()
    if isinstance(kind, types.BaseTuple):
        for at, part in enumerate(kind.types):
            own = _without_owner(builder, context, part, builder.extract_value(value, at))
            value = builder.insert_value(value, own, at)
    return value


@intrinsic
def borrowed(typing: Any, given: Any) -> Any:
    """Return arrays, also those in tuples, whose references are not counted.

    Each row taken of an array counts one more of it, in memory that all threads of a team write.
    Whoever calls the compiled function has to keep the arrays for as long as it runs, which numba
    does with arguments.
    """

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _without_owner(builder, context, given, arguments[0])

    return given(given), codegen
