"""Code of ggml's blocks of 32 elements in vector registers: a block is two vectors, whose codes of
four bits lie in the low and in the high bits of the same bytes.

All is computed in fp32 in the order of the `gguf` package, without fused multiply-adds. Addresses
are int64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from mtp_kernels.cpu.code import (
    FLOAT_BYTES,
    LANES,
    PAIRS,
    VECTOR,
    by_count,
    every_word,
    fold,
    integer,
    load,
    splat,
)

Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, MXFP4 = range(6)
SIZE = 2 * LANES  # elements of a block

_HALF_BYTES = LANES * FLOAT_BYTES
_BYTES, _BITS = ir.VectorType(ir.IntType(8), LANES), ir.IntType(LANES)
_WORD = ir.IntType(32)
_MAGNITUDE, _SIGN = 0x7FFFFFFF, 0x80000000
_ROUNDER = 1.5 * 2.0**23  # where the spacing of fp32 is 1: to nearest, ties to even
_E2M1_STEPS = (0.5, 1.5, 2.5, 3.5, 5.0, 7.0, 10.0)  # halves between two numbers, in halves

Halves = list[Any]  # the vectors of a block


def _every(value: float) -> Any:
    return ir.Constant(VECTOR, [value] * LANES)


def _elements(builder: Any, at: Any) -> Halves:
    return [load(builder, builder.add(at, integer(h * _HALF_BYTES)), VECTOR) for h in range(2)]


def _masked(builder: Any, vector: Any, mask: int) -> Any:
    return builder.and_(builder.bitcast(vector, PAIRS), every_word(mask))


def _sizes(builder: Any, vector: Any) -> Any:
    return builder.bitcast(_masked(builder, vector, _MAGNITUDE), VECTOR)


def _signed_as(builder: Any, sizes: Any, vector: Any) -> Any:
    """Sizes with the signs of a vector."""
    both = builder.or_(builder.bitcast(sizes, PAIRS), _masked(builder, vector, _SIGN))
    return builder.bitcast(both, VECTOR)


def _at_most(builder: Any, vector: Any, top: float) -> Any:
    return builder.select(builder.fcmp_ordered("<", vector, _every(top)), vector, _every(top))


def _first_lane(builder: Any, halves: Halves, combine: Any) -> Any:
    """All elements of a block combined into one."""
    folded = fold(builder, [combine(builder, *halves)], combine)
    return builder.extract_element(folded, ir.Constant(_WORD, 0))


def _larger(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.icmp_signed(">", a, b), a, b)


def _smaller(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.icmp_signed("<", a, b), a, b)


def _bits_of_sizes(builder: Any, halves: Halves) -> tuple[Halves, Any]:
    """The bits of all sizes, and of the largest: they are ordered as the sizes are."""
    sizes = [_masked(builder, half, _MAGNITUDE) for half in halves]
    return sizes, _first_lane(builder, sizes, _larger)


def _of_elements(code: Callable[[Any, Any], Any], result: Any) -> Any:
    """Return the intrinsic `result(address of a block's elements)`."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return code(builder, arguments[0])

    def of_elements(typing: Any, at: Any) -> Any:
        return result(types.int64), codegen

    return intrinsic(of_elements)


def _largest(builder: Any, at: Any) -> Any:
    return _bits_of_sizes(builder, _elements(builder, at))[1]


def _farthest(builder: Any, at: Any) -> Any:
    sizes, most = _bits_of_sizes(builder, _elements(builder, at))
    found = [builder.icmp_unsigned("==", half, splat(builder, most)) for half in sizes]
    first, last = (builder.zext(builder.bitcast(half, _BITS), _WORD) for half in found)
    places = builder.or_(first, builder.shl(last, ir.Constant(_WORD, LANES)))
    place = builder.zext(builder.cttz(places, ir.Constant(ir.IntType(1), 1)), at.type)
    moved = builder.add(at, builder.mul(place, integer(FLOAT_BYTES)))
    return load(builder, moved, VECTOR.element)


def _extreme(combine: Any) -> Callable[[Any, Any], Any]:
    def ordered(builder: Any, bits: Any, kind: Any) -> Any:
        """Bits as signed integers that are ordered as the numbers, and back."""
        places = ir.Constant(kind, [31] * LANES if kind is PAIRS else 31)
        mask = ir.Constant(kind, [_MAGNITUDE] * LANES if kind is PAIRS else _MAGNITUDE)
        return builder.xor(bits, builder.and_(builder.ashr(bits, places), mask))

    def extreme(builder: Any, at: Any) -> Any:
        halves = [
            ordered(builder, builder.bitcast(half, PAIRS), PAIRS) for half in _elements(builder, at)
        ]
        found = ordered(builder, _first_lane(builder, halves, combine), _WORD)
        return builder.bitcast(found, VECTOR.element)

    return extreme


largest_bits = _of_elements(_largest, types.uint32)  # of the size
farthest = _of_elements(_farthest, types.float32)  # from 0; of two, the first
least = _of_elements(_extreme(_smaller), types.float32)
most = _of_elements(_extreme(_larger), types.float32)


class _Block:
    """Emits the code of one block, for the arguments of `encode_block`."""

    def __init__(self, builder: Any, arguments: Any) -> None:
        self._builder = builder
        at, *numbers, self._out, self._kept = arguments
        self._numbers = [splat(builder, number) for number in numbers]
        self._halves = _elements(builder, at)

    def q8_0(self) -> None:
        """Code to the nearest integer, halves away from 0."""
        b, (inverse, scale, _, _) = self._builder, self._numbers
        for half, values in enumerate(self._halves):
            scaled = b.fmul(values, inverse)
            size = _sizes(b, scaled)
            near = b.fsub(b.fadd(size, _every(_ROUNDER)), _every(_ROUNDER))
            went_down = b.fcmp_ordered(">=", b.fsub(size, near), _every(0.5))  # to the even one
            near = b.select(went_down, b.fadd(near, _every(1.0)), near)
            whole = _signed_as(b, near, scaled)
            self._store(b.trunc(b.fptosi(whole, PAIRS), _BYTES), half * LANES)
            self._keep(half, b.fmul(whole, scale))

    def symmetric(self, bits: int) -> None:
        """Code as Q4_0 or Q5_0: the number farthest from 0 has the lowest code."""
        b, (inverse, scale, _, _) = self._builder, self._numbers
        offset = 1 << bits - 1
        codes = []
        for half, values in enumerate(self._halves):
            shifted = b.fadd(b.fmul(values, inverse), _every(offset + 0.5))
            codes.append(self._whole(shifted, bits))
            signed = b.sub(codes[-1], every_word(offset))
            self._keep(half, b.fmul(b.sitofp(signed, VECTOR), scale))
        self._pack(codes, bits)

    def above_minimum(self, bits: int) -> None:
        """Code as Q4_1 or Q5_1: codes count steps above the least number."""
        b, (inverse, scale, exact, read) = self._builder, self._numbers
        codes = []
        for half, values in enumerate(self._halves):
            steps = b.fmul(b.fsub(values, exact), inverse)
            codes.append(self._whole(b.fadd(steps, _every(0.5)), bits))
            self._keep(half, b.fadd(b.fmul(b.sitofp(codes[-1], VECTOR), scale), read))
        self._pack(codes, bits)

    def mxfp4(self) -> None:
        """Code as the nearest of 0, 1, 2, 3, 4, 6, 8 and 12 halves, of two the smaller one."""
        b, unit = self._builder, self._numbers[1]
        codes = []
        for half, values in enumerate(self._halves):
            size, code, numbers = _sizes(b, values), every_word(0), every_word(0)
            for step, above in zip(_E2M1_STEPS, (1, 1, 1, 1, 2, 2, 4), strict=True):
                is_above = b.fcmp_ordered(">", size, b.fmul(unit, _every(step)))
                code = b.sub(code, b.sext(is_above, PAIRS))
                numbers = b.add(numbers, b.and_(b.sext(is_above, PAIRS), every_word(above)))
            kept = b.fmul(b.sitofp(numbers, VECTOR), unit)
            self._keep(half, _signed_as(b, kept, values))
            negative = b.lshr(_masked(b, values, _SIGN), every_word(28))
            is_none = b.icmp_unsigned("==", code, every_word(0))
            codes.append(b.or_(code, b.select(is_none, every_word(0), negative)))
        self._pack(codes, 4)

    def _whole(self, numbers: Any, bits: int) -> Any:
        top = float((1 << bits) - 1)
        return self._builder.fptosi(_at_most(self._builder, numbers, top), PAIRS)

    def _pack(self, codes: Halves, bits: int) -> None:
        """Store fifth bits, then nibbles."""
        b, at = self._builder, 0
        if bits == 5:
            for code in codes:
                fifth = b.icmp_unsigned(">", code, every_word(15))
                self._store(b.bitcast(fifth, _BITS), at)
                at += LANES // 8
            codes = [b.and_(code, every_word(15)) for code in codes]
        both = b.or_(codes[0], b.shl(codes[1], every_word(4)))
        self._store(b.trunc(both, _BYTES), at)

    def _store(self, value: Any, at: int) -> None:
        place = self._builder.add(self._out, integer(at))
        pointer = self._builder.inttoptr(place, value.type.as_pointer())
        self._builder.store(value, pointer, align=1)

    def _keep(self, half: int, values: Any) -> None:
        place = self._builder.add(self._kept, integer(half * _HALF_BYTES))
        pointer = self._builder.inttoptr(place, VECTOR.as_pointer())
        self._builder.store(values, pointer, align=FLOAT_BYTES)


_CODES: dict[int, Callable[[_Block], None]] = {
    Q8_0: _Block.q8_0,
    Q4_0: lambda block: block.symmetric(4),
    Q5_0: lambda block: block.symmetric(5),
    Q4_1: lambda block: block.above_minimum(4),
    Q5_1: lambda block: block.above_minimum(5),
    MXFP4: _Block.mxfp4,
}


@intrinsic
def encode_block(
    typing: Any,
    kind: Any,
    at: Any,
    inverse: Any,
    scale: Any,
    exact: Any,
    read: Any,
    out: Any,
    kept: Any,
) -> Any:
    """Store the codes of the elements at `at` from `out` on, and the numbers that they are read as.

    inverse is what weights are multiplied by after the minimum, exact, was taken from them; scale
    and read are scale and minimum as they are read.
    """

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number, *rest = arguments
        by_count(builder, number, _CODES, lambda n: _CODES[n](_Block(builder, rest)))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 2, *[types.float32] * 4, *[types.int64] * 2), codegen
