"""Units of a CPU that multiply tiles of bf16: matrix units (AMX), AVX-512-BF16, or float32 vectors.

A tile is 16 rows of 16 entries of 32 bits. An entry is a pair of bf16 or, for float32 vectors, one
number: converted once, when it is packed, and not in every product. AMX
multiplies whole tiles (cpu/matrix_units.py), the others one entry of a row of the first operand
with a row of the second.

Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, VDPBF16PS.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from mtp_kernels.cpu.code import INT, PAIRS, VECTOR, fma, integer, splat
from mtp_kernels.cpu.matrix_units import (
    ENTRY_BYTES,
    HAS_TILES,
    TILE,
    Product,
    Shape,
    moved,
    multiply_tiles,
    pointer,
)

DEPTH = 32  # bf16 of a row of pairs: tokens, and the sizes of one, fill whole ones

_NUMBER = ir.IntType(32)


@dataclass(frozen=True)
class Unit:
    """Code of products, bf16 of an entry, and multiplications in the time of one in float32."""

    speedup: float
    entry_terms: int
    multiply: Callable[[Any, Product, Shape], None]


def product_on(unit: str, shape: Shape) -> Any:
    """Return a product of a shape by a unit of UNITS, for compiled code; it takes a Product's
    fields as a tuple."""
    multiply = UNITS[unit].multiply

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        multiply(builder, Product(*cgutils.unpack_tuple(builder, arguments[0])), shape)
        return context.get_dummy_value()

    def product(typing: Any, operands: Any) -> Any:
        return types.void(operands), codegen

    return intrinsic(product)


@cache
def units_here() -> tuple[str, ...]:
    """Return the units of UNITS that this CPU has, the fastest here first."""
    has = {
        "amx": HAS_TILES,
        "avx512_bf16": binding.get_host_cpu_features().get("avx512bf16", False),
        "float32": True,
    }
    here = (name for name in UNITS if has[name])
    return tuple(sorted(here, key=lambda name: -UNITS[name].speedup))


@dataclass(frozen=True)
class _Vectors:
    """Products of a few rows of the first operand at a time, whose sums stay in registers.

    add takes 16 sums and 16 entries of either operand.
    """

    add: Callable[[Any, Any, Any, Any], Any]

    def __call__(self, builder: Any, given: Product, shape: Shape) -> None:
        rows = _rows_at_once(shape.b_tiles)
        blocks = TILE // rows
        with cgutils.for_range(builder, integer(shape.a_tiles * blocks), intp=INT) as loop:
            tile = builder.udiv(loop.index, integer(blocks))
            row = builder.mul(builder.urem(loop.index, integer(blocks)), integer(rows))
            block = given._replace(
                a=moved(builder, given.a, (given.a_tile, tile), (given.a_row, row)),
                c=moved(builder, given.c, (given.c_i, tile), (given.c_row, row)),
            )
            self._block(builder, block, rows, shape)

    def _block(self, builder: Any, given: Product, rows: int, shape: Shape) -> None:
        places = [
            pointer(builder, moved(builder, given.c, (given.c_row, r), (given.c_j, j)), VECTOR)
            for r in range(rows)
            for j in range(shape.b_tiles)
        ]
        sums = [cgutils.alloca_once(builder, VECTOR) for _ in places]  # registers, once optimized
        for own, place in zip(sums, places, strict=True):
            start = builder.load(place, align=4) if shape.adds else ir.Constant(VECTOR, None)
            builder.store(start, own)
        with cgutils.for_range(builder, given.chunks, intp=INT) as loop:
            lines = [
                moved(builder, given.a, (given.a_row, r), (given.a_chunk, loop.index))
                for r in range(rows)
            ]
            tiles = [
                moved(builder, given.b, (given.b_tile, j), (given.b_chunk, loop.index))
                for j in range(shape.b_tiles)
            ]
            for entry in range(TILE):
                at = [moved(builder, tile, (given.b_row, entry)) for tile in tiles]
                rights = [builder.load(pointer(builder, one, PAIRS), align=2) for one in at]
                self._add_entry(builder, sums, lines, rights, entry)
        for own, place in zip(sums, places, strict=True):
            builder.store(builder.load(own), place, align=4)

    def _add_entry(
        self, builder: Any, sums: list[Any], lines: list[Any], rights: list[Any], entry: int
    ) -> None:
        """Add the products of one entry of every row."""
        for r, line in enumerate(lines):
            at = builder.add(line, integer(entry * ENTRY_BYTES))
            left = splat(builder, builder.load(pointer(builder, at, _NUMBER), align=2))
            for j, right in enumerate(rights):
                own = sums[r * len(rights) + j]
                builder.store(self.add(builder, builder.load(own), left, right), own)


def _rows_at_once(b_tiles: int) -> int:
    """Return the rows whose sums, with what they are made of, fit into the registers."""
    wide = binding.get_host_cpu_features().get("avx512f", False)
    return 8 if wide else 4 // b_tiles


def _add_dot(builder: Any, sums: Any, a: Any, b: Any) -> Any:
    """Add the dot products of pairs of bf16 by one instruction."""
    binding.initialize_native_asmparser()
    kind = ir.FunctionType(VECTOR, [PAIRS, PAIRS, VECTOR])
    return builder.asm(kind, "vdpbf16ps $2, $1, $0", "=v,v,v,0", [a, b, sums], False)


def _add_product(builder: Any, sums: Any, a: Any, b: Any) -> Any:
    """Add the products of float32 numbers."""
    return fma(builder, builder.bitcast(a, VECTOR), builder.bitcast(b, VECTOR), sums)


# Measured on Intel's Emerald Rapids: a vdpbf16ps takes the time of four fma, which make twice its
# multiplications. AMD's, not measured here, is taken to be as fast as an fma: published products
# on a Zen 4 are twice as fast by it as in float32 (github.com/iree-org/iree/pull/15089).
_DOT_SPEEDUP = 2.0 if binding.get_host_cpu_name().startswith("znver") else 0.5

UNITS = {
    "amx": Unit(16.0, 2, partial(multiply_tiles, "tdpbf16ps")),
    "avx512_bf16": Unit(_DOT_SPEEDUP, 2, _Vectors(_add_dot)),
    "float32": Unit(1.0, 1, _Vectors(_add_product)),
}
