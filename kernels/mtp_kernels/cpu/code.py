"""Code of vector registers: what compiled kernels are made of, as LLVM's instructions.

Vectors of 16 floats are one AVX-512 register; LLVM splits them for narrower machines. Functions
take a builder and emit at its place. Addresses are int64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from mtp_kernels.sizes import LANES as LANES

FLOAT_BYTES = 4

FLOAT = ir.FloatType()
INT = ir.IntType(64)
VECTOR = ir.VectorType(FLOAT, LANES)
PAIRS = ir.VectorType(ir.IntType(32), LANES)  # of bf16, the first in the lower half


def integer(value: int) -> Any:
    return ir.Constant(INT, value)


def load(builder: Any, address: Any, kind: Any) -> Any:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=FLOAT_BYTES)


def store(builder: Any, value: Any, address: Any) -> None:
    pointer = builder.inttoptr(address, value.type.as_pointer())
    builder.store(value, pointer, align=FLOAT_BYTES)


def row_at(builder: Any, base: Any, stride_bytes: Any, index: int, columns: int = 0) -> Any:
    """base + index * stride + columns floats."""
    moved = builder.add(base, builder.mul(stride_bytes, integer(index)))
    return builder.add(moved, integer(columns * FLOAT_BYTES))


def bytes_of(builder: Any, floats: Any) -> Any:
    return builder.mul(floats, integer(FLOAT_BYTES))


def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    kind = ir.FunctionType(VECTOR, [VECTOR] * 3)
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32")
    return builder.call(function, [a, b, c])


def prefetch(builder: Any, address: Any) -> None:
    """Ask for the cache line at an address; one past the end of memory does no harm."""
    pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch")
    settings = [ir.Constant(number, value) for value in (0, 3, 1)]  # read, keep near, data
    builder.call(function, [builder.inttoptr(address, pointer), *settings])


def splat(builder: Any, value: Any) -> Any:
    """A vector of 32-bit values that are all the same."""
    undefined = ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined)
    first = builder.insert_element(undefined, value, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(first, undefined, every_word(0))


def every_word(value: int) -> Any:
    """A vector of 32-bit integers that are all one constant."""
    return ir.Constant(PAIRS, [value] * LANES)


def widened(builder: Any, pairs: Any) -> tuple[Any, Any]:
    """The lower and the upper bf16 of pairs as floats, whose upper bits they are."""
    shift, upper = every_word(16), every_word(0xFFFF0000)
    halves = builder.shl(pairs, shift), builder.and_(pairs, upper)
    return builder.bitcast(halves[0], VECTOR), builder.bitcast(halves[1], VECTOR)


def fold(builder: Any, vectors: list[Any], combine: Any) -> Any:
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


def entries(builder: Any, vector: Any, start: int, count: int) -> Any:
    """Some entries of a vector, as a shorter one."""
    order = ir.Constant(ir.VectorType(ir.IntType(32), count), list(range(start, start + count)))
    return builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), order)


def added(builder: Any, a: Any, b: Any) -> Any:
    return builder.fadd(a, b)


def larger(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def by_count(builder: Any, count: Any, counts: Iterable[int], code: Callable[[int], None]) -> None:
    """`code(n)` for the one of `counts` that `count` is."""
    done = builder.append_basic_block("done")
    chosen = builder.switch(count, done)
    for number in counts:
        block = builder.append_basic_block(f"count_{number}")
        chosen.add_case(integer(number), block)
        builder.position_at_end(block)
        code(number)
        builder.branch(done)
    builder.position_at_end(done)


def loop(builder: Any, count: Any, starts: list[Any], step: Any) -> list[Any]:
    """`step(index, values) -> values` for index 0 to count - 1, count at least 1."""
    entry = builder.basic_block
    body = builder.append_basic_block("body")
    done = builder.append_basic_block("done")
    builder.branch(body)
    builder.position_at_end(body)
    index = builder.phi(INT)
    index.add_incoming(integer(0), entry)
    values = [builder.phi(start.type) for start in starts]
    for value, start in zip(values, starts, strict=True):
        value.add_incoming(start, entry)
    results = step(index, values)
    following = builder.add(index, integer(1))
    index.add_incoming(following, body)
    for value, result in zip(values, results, strict=True):
        value.add_incoming(result, body)
    builder.cbranch(builder.icmp_signed("<", following, count), body, done)
    builder.position_at_end(done)
    return list(results)
