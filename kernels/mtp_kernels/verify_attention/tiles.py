"""Tiles of bf16: their packing, and their products on the fastest unit of this CPU.

See bf16_units for units.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from mtp_kernels.cpu.code import PAIRS, integer
from mtp_kernels.cpu.matrix_units import (
    ENTRY_BYTES,
    ROW_BYTES,
    TILE,
    TILE_BYTES,
    Shape,
    pointer,
)
from mtp_kernels.verify_attention.bf16_units import DEPTH, UNITS, product_on, units_here

_HALVES = ir.VectorType(ir.IntType(16), DEPTH)
_UNIT = units_here()[0]

SPEEDUP = UNITS[_UNIT].speedup
ENTRY_TERMS = UNITS[_UNIT].entry_terms
ROW_TERMS = TILE * ENTRY_TERMS
TERM_BYTES = ENTRY_BYTES // ENTRY_TERMS

product_2_2 = product_on(_UNIT, Shape(2, 2, adds=False))
product_2_1 = product_on(_UNIT, Shape(2, 1, adds=False))
add_product_2_2 = product_on(_UNIT, Shape(2, 2, adds=True))
add_product_1_2 = product_on(_UNIT, Shape(1, 2, adds=True))


def _vector(builder: Any, address: Any, kind: Any) -> Any:
    return builder.load(pointer(builder, address, kind), align=2)


def _mix(builder: Any, a: Any, b: Any, order: list[int]) -> Any:
    mask = ir.Constant(ir.VectorType(ir.IntType(32), len(order)), order)
    return builder.shuffle_vector(a, b, mask)


@intrinsic
def transpose(typing: Any, source: Any, stride: Any, target: Any) -> Any:
    """Transpose 16 lines of 16 32-bit entries, `stride` bytes apart, into the tile at `target`."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, stride, target = arguments
        lines = [
            _vector(builder, builder.add(source, builder.mul(stride, integer(i))), PAIRS)
            for i in range(TILE)
        ]
        # Four rounds of perfect shuffles: line i of the next round takes from lines i and i + 8.
        low = [half for i in range(TILE // 2) for half in (i, TILE + i)]
        high = [TILE // 2 + entry for entry in low]
        for _ in range(4):
            pairs = [(lines[i], lines[i + TILE // 2]) for i in range(TILE // 2)]
            lines = [_mix(builder, a, b, order) for a, b in pairs for order in (low, high)]
        for i, line in enumerate(lines):
            place = builder.add(target, integer(i * ROW_BYTES))
            builder.store(line, pointer(builder, place, PAIRS), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def interleave(typing: Any, first: Any, second: Any, target: Any) -> Any:
    """Interleave 32 bf16 of two lines: a row of the tile at `target`, and of the next one."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        first, second = (_vector(builder, address, _HALVES) for address in arguments[:2])
        for number in (0, 1):
            entries = range(number * TILE, (number + 1) * TILE)
            order = [half for i in entries for half in (i, DEPTH + i)]
            place = builder.add(arguments[2], integer(number * TILE_BYTES))
            line = _mix(builder, first, second, order)
            builder.store(line, pointer(builder, place, _HALVES), align=2)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen
