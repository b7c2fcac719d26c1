"""Sums over the groups of ggml's K-quants, 16 groups at once in vector registers.

Every group has a lane: element i of all lanes lies at x + 16 * i. A lane adds up in the order of
llama.cpp, without fused multiply-adds, so that its bits are those of `ggml-quants.c`. What goes
into the sums and comes out of them are lines of 16 numbers, one per lane, from the address `state`
on; the number of each line is below. All numbers are fp32, addresses int64; size is the number of a
group's elements.

Source: llama.cpp `ggml/src/ggml-quants.c`, make_qkx2_quants and make_qx_quants.
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
    every_word,
    integer,
    load,
    loop,
    splat,
    store,
)

# Lines of the state: what weights are above the size of an element; the smallest and the largest
# element, or the largest size and the element that has it; what codes are made with, and what they
# stand for; sums of weights, elements, codes and errors.
MEAN, LEAST, MOST, INVERSE, SCALE, MINIMUM = range(6)
SUM_W, SUM_X, SUM_L, SUM_L2, SUM_XL, ERROR, SQUARES = range(6, 13)
STATE_LINES = 13

_LINE_BYTES = LANES * FLOAT_BYTES
_MAGIC = 12582912.0  # 3 * 2 ** 22: the low bits of a sum with it are the nearest whole number
_LOW_BITS, _MIDDLE, _SIZE_BITS = 0x7FFFFF, 0x400000, 0x7FFFFFFF
_ZERO = ir.Constant(VECTOR, None)

Step = Callable[[Any, Any, list[Any]], list[Any]]


class _Groups:
    """Emits code over groups, for the arguments of one intrinsic."""

    def __init__(self, builder: Any, arguments: Any) -> None:
        self.builder = builder
        self._x, self._state, self._size, top = arguments
        self._top = splat(builder, builder.trunc(top, ir.IntType(32)))

    def line(self, number: int) -> Any:
        return load(self.builder, self._at(self._state, integer(number)), VECTOR)

    def keep(self, lines: dict[int, Any]) -> None:
        for number, value in lines.items():
            store(self.builder, value, self._at(self._state, integer(number)))

    def element(self, index: Any) -> Any:
        return load(self.builder, self._at(self._x, index), VECTOR)

    def overwrite(self, index: Any, value: Any) -> None:
        store(self.builder, value, self._at(self._x, index))

    def each(self, starts: list[Any], step: Step) -> list[Any]:
        """Call step(index, elements, sums) for every element; return the last sums."""
        return loop(self.builder, self._size, starts, lambda i, s: step(i, self.element(i), s))

    def size_of(self, value: Any) -> Any:
        bits = self.builder.and_(self.builder.bitcast(value, PAIRS), every_word(_SIZE_BITS))
        return self.builder.bitcast(bits, VECTOR)

    def weight(self, mean: Any, value: Any) -> Any:
        return self.builder.fadd(mean, self.size_of(value))

    def code(self, value: Any, lowest: Any) -> Any:
        """Return the nearest whole number between the lowest and the highest code."""
        build = self.builder
        summed = build.fadd(value, ir.Constant(VECTOR, [_MAGIC] * LANES))
        bits = build.and_(build.bitcast(summed, PAIRS), every_word(_LOW_BITS))
        whole = build.sub(bits, every_word(_MIDDLE))
        whole = build.select(build.icmp_signed("<", whole, self._top), whole, self._top)
        whole = build.select(build.icmp_signed(">", whole, lowest), whole, lowest)
        return build.sitofp(whole, VECTOR)

    def code_above_minimum(self, value: Any, inverse: Any, least: Any) -> Any:
        build = self.builder
        return self.code(build.fmul(inverse, build.fsub(value, least)), every_word(0))

    def signed_code(self, value: Any, inverse: Any) -> Any:
        """Return a code between -top - 1 and top."""
        below = self.builder.xor(self._top, every_word(0xFFFFFFFF))
        return self.code(self.builder.fmul(inverse, value), below)

    def _at(self, base: Any, number: Any) -> Any:
        return self.builder.add(base, self.builder.mul(number, integer(_LINE_BYTES)))


def _over_groups(emit: Callable[[_Groups], None]) -> Any:
    """Return the intrinsic f(x, state, size, top) whose code `emit` emits."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        emit(_Groups(builder, arguments))
        return context.get_dummy_value()

    def over_groups(typing: Any, x: Any, state: Any, size: Any, top: Any) -> Any:
        return types.void(*[types.int64] * 4), codegen

    return intrinsic(over_groups)


def _squares(groups: _Groups) -> None:
    build = groups.builder

    def step(index: Any, value: Any, sums: list[Any]) -> list[Any]:
        return [build.fadd(sums[0], build.fmul(value, value))]

    groups.keep({SQUARES: groups.each([_ZERO], step)[0]})


def _extent(groups: _Groups) -> None:
    build, mean = groups.builder, groups.line(MEAN)

    def step(index: Any, value: Any, sums: list[Any]) -> list[Any]:
        least, most, sum_w, sum_x = sums
        weight = groups.weight(mean, value)
        least = build.select(build.fcmp_ordered("<", value, least), value, least)
        most = build.select(build.fcmp_ordered(">", value, most), value, most)
        weighted = build.fmul(weight, value)
        return [least, most, build.fadd(sum_w, weight), build.fadd(sum_x, weighted)]

    first = groups.element(integer(0))
    found = groups.each([first, first, _ZERO, _ZERO], step)
    groups.keep(dict(zip((LEAST, MOST, SUM_W, SUM_X), found, strict=True)))


def _code_sums(groups: _Groups) -> None:
    build = groups.builder
    mean, inverse, least = (groups.line(number) for number in (MEAN, INVERSE, LEAST))

    def step(index: Any, value: Any, sums: list[Any]) -> list[Any]:
        code = groups.code_above_minimum(value, inverse, least)
        weighted = build.fmul(groups.weight(mean, value), code)
        more = weighted, build.fmul(weighted, code), build.fmul(weighted, value)
        return [build.fadd(total, one) for total, one in zip(sums, more, strict=True)]

    found = groups.each([_ZERO] * 3, step)
    groups.keep(dict(zip((SUM_L, SUM_L2, SUM_XL), found, strict=True)))


def _error(groups: _Groups) -> None:
    build = groups.builder
    lines = MEAN, INVERSE, LEAST, SCALE, MINIMUM
    mean, inverse, least, scale, minimum = (groups.line(number) for number in lines)

    def step(index: Any, value: Any, sums: list[Any]) -> list[Any]:
        code = groups.code_above_minimum(value, inverse, least)
        off = build.fsub(build.fadd(build.fmul(scale, code), minimum), value)
        weighted = build.fmul(groups.weight(mean, value), build.fmul(off, off))
        return [build.fadd(sums[0], weighted)]

    groups.keep({ERROR: groups.each([_ZERO], step)[0]})


def _codes(groups: _Groups) -> None:
    inverse, least = groups.line(INVERSE), groups.line(LEAST)

    def step(index: Any, value: Any, sums: list[Any]) -> list[Any]:
        groups.overwrite(index, groups.code_above_minimum(value, inverse, least))
        return []

    groups.each([], step)


def _farthest(groups: _Groups) -> None:
    build = groups.builder

    def step(index: Any, value: Any, sums: list[Any]) -> list[Any]:
        amax, farthest = sums
        size = groups.size_of(value)
        farther = build.fcmp_ordered(">", size, amax)
        return [build.select(farther, size, amax), build.select(farther, value, farthest)]

    found = groups.each([_ZERO, _ZERO], step)
    groups.keep(dict(zip((LEAST, MOST), found, strict=True)))


def _signed_sums(groups: _Groups) -> None:
    build, inverse = groups.builder, groups.line(INVERSE)

    def step(index: Any, value: Any, sums: list[Any]) -> list[Any]:
        code, weight = groups.signed_code(value, inverse), build.fmul(value, value)
        products = build.fmul(build.fmul(weight, value), code)
        squares = build.fmul(build.fmul(weight, code), code)
        return [build.fadd(sums[0], products), build.fadd(sums[1], squares)]

    found = groups.each([_ZERO, _ZERO], step)
    groups.keep(dict(zip((SUM_XL, SUM_L2), found, strict=True)))


def _signed_codes(groups: _Groups) -> None:
    inverse = groups.line(INVERSE)

    def step(index: Any, value: Any, sums: list[Any]) -> list[Any]:
        groups.overwrite(index, groups.signed_code(value, inverse))
        return []

    groups.each([], step)


# Each is f(x, state, size, top); codes replace the elements.
squares, extent, code_sums, error, codes = map(
    _over_groups, (_squares, _extent, _code_sums, _error, _codes)
)
farthest, signed_sums, signed_codes = map(_over_groups, (_farthest, _signed_sums, _signed_codes))
