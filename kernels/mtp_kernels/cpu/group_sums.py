"""Parts of products with groups of codes beside the sums: scales, minimums, and codes that are
expanded once for many rows."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from mtp_kernels.cpu.code import (
    FLOAT_BYTES,
    LANES,
    VECTOR,
    added,
    fma,
    fold,
    integer,
    load,
    loop,
    row_at,
    splat,
    store,
)
from mtp_kernels.cpu.panel_forms import SCALE_BYTES
from mtp_kernels.cpu.stored_rows import STORED

WHOLE = (0, 1)  # both columns of vectors of a panel


def scales_at(builder: Any, factor: float, places: list[Any]) -> list[Any]:
    """Vectors of scales at addresses, times a power of two that sums of products lack."""
    lines = [load(builder, at, VECTOR) for at in places]
    if factor != 1:
        lines = [builder.fmul(line, ir.Constant(VECTOR, [factor] * LANES)) for line in lines]
    return lines


def old_or_zeros(builder: Any, outs: list[Any], adds: Any) -> list[Any]:
    """Vectors at addresses, or zeros where they are not added to."""
    zero = ir.Constant(VECTOR, None)
    return [builder.select(adds, load(builder, at, VECTOR), zero) for at in outs]


@intrinsic
def add_minimums(typing: Any, x: Any, depth: Any, minimums: Any, out: Any) -> Any:
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


@intrinsic
def expand(typing: Any, w: Any, kind: Any, first: Any, depth: Any, out: Any) -> Any:
    """out[k, :PANEL] = the numbers of rows [first, first + depth) of a weight, or pairs of them."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        w, _, first, depth, out = arguments
        stored = STORED[signature.args[1]]
        start = builder.udiv(first, integer(stored.rows))

        def step(number: Any, nothing: list[Any]) -> list[Any]:
            at = row_at(builder, w, builder.add(start, number), stored.bytes)
            row = builder.add(out, builder.mul(number, integer(stored.words * SCALE_BYTES)))
            for c in WHOLE:
                for k, vector in enumerate(stored.read(builder, at, c)):
                    place = integer(k * SCALE_BYTES + c * LANES * FLOAT_BYTES)
                    store(builder, vector, builder.add(row, place))
            return nothing

        loop(builder, builder.udiv(depth, integer(stored.rows)), [], step)
        return context.get_dummy_value()

    return types.void(types.int64, kind, *[types.int64] * 3), codegen


@intrinsic
def add_scaled(typing: Any, sums: Any, kind: Any, scales: Any, out: Any, add: Any) -> Any:
    """out[:PANEL] = sums [PANEL] of products with codes times scales; added to if `add`."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        sums, _, scales, out, add = arguments
        made, lines, outs = (
            [builder.add(at, integer(c * LANES * FLOAT_BYTES)) for c in WHOLE]
            for at in (sums, scales, out)
        )
        old = old_or_zeros(builder, outs, builder.icmp_signed("!=", add, integer(0)))
        scales = scales_at(builder, STORED[signature.args[1]].factor, lines)
        for at, line, before, place in zip(made, scales, old, outs, strict=True):
            store(builder, fma(builder, load(builder, at, VECTOR), line, before), place)
        return context.get_dummy_value()

    return types.void(types.int64, kind, *[types.int64] * 3), codegen
