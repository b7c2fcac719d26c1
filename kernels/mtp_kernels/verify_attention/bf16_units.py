"""Units of a CPU that multiply tiles of bf16: matrix units (AMX), AVX-512-BF16, or float32 vectors.

A tile is 16 rows of 16 entries of 32 bits. An entry is a pair of bf16 or, for float32 vectors, one
number: converted once, when it is packed, and not in every product. Row k of the second operand's
tile holds the terms of 16 sums that meet entry k of a row of the first operand's. AMX multiplies
whole tiles, the others one entry of a row with a row of the second operand.
Addresses are int64, and strides and steps are bytes.

Sources: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18 (AMX),
and volume 2, VDPBF16PS.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from mtp_kernels.cpu.code import INT, LANES, PAIRS, VECTOR, fma, integer, splat

TILE = LANES  # rows of a tile, and 32-bit entries of a row
ROW_BYTES = 64
TILE_BYTES = TILE * ROW_BYTES
ENTRY_BYTES = 4
DEPTH = 32  # bf16 of a row of pairs: tokens, and the sizes of one, fill whole ones

_BYTE, _NUMBER = ir.IntType(8), ir.IntType(32)


class Product(NamedTuple):
    """Arguments of a product c[i, j] = (c[i, j] +) sum over chunks of a[i] @ b[j], in code.

    Of each an address, a step from tile to tile, and of a and b one from chunk to chunk, of which
    there is at least one; rows of each lie a stride apart; c has a step for i and one for j.
    """

    a: Any
    a_row: Any
    a_tile: Any
    a_chunk: Any
    b: Any
    b_row: Any
    b_tile: Any
    b_chunk: Any
    chunks: Any
    c: Any
    c_row: Any
    c_i: Any
    c_j: Any


@dataclass(frozen=True)
class Shape:
    """Tiles of the operands, and whether products are added to what is there."""

    a_tiles: int
    b_tiles: int
    adds: bool


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
        "amx": torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx(),
        "avx512_bf16": binding.get_host_cpu_features().get("avx512bf16", False),
        "float32": True,
    }
    here = (name for name in UNITS if has[name])
    return tuple(sorted(here, key=lambda name: -UNITS[name].speedup))


def _moved(builder: Any, base: Any, *moves: tuple[Any, Any]) -> Any:
    """Return base + step * count of each move."""
    for step, count in moves:
        count = integer(count) if isinstance(count, int) else count
        base = builder.add(base, builder.mul(step, count))
    return base


def pointer(builder: Any, address: Any, kind: Any = _BYTE) -> Any:
    """Return an address as a pointer to a kind."""
    return builder.inttoptr(address, kind.as_pointer())


def tile_call(builder: Any, name: str, *operands: Any) -> None:
    """Emit an instruction on AMX's tiles; an int is the number of a tile."""
    values = [ir.Constant(_BYTE, o) if isinstance(o, int) else o for o in operands]
    kind = ir.FunctionType(ir.VoidType(), [value.type for value in values])
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}")
    builder.call(function, values)


def _on_tiles(builder: Any, given: Product, shape: Shape) -> None:
    """Multiply on at most eight tiles: c first, row by row, then a, then b."""
    a_tiles, b_tiles = range(shape.a_tiles), range(shape.b_tiles)
    sums = {(i, j): i * shape.b_tiles + j for i in a_tiles for j in b_tiles}
    lefts = [len(sums) + i for i in a_tiles]
    rights = [len(sums) + shape.a_tiles + j for j in b_tiles]
    places = {
        (i, j): pointer(builder, _moved(builder, given.c, (given.c_i, i), (given.c_j, j)))
        for i, j in sums
    }
    for ij, tile in sums.items():
        if shape.adds:
            tile_call(builder, "tileloadd64", tile, places[ij], given.c_row)
        else:
            tile_call(builder, "tilezero", tile)
    with cgutils.for_range(builder, given.chunks, intp=INT) as loop:
        for i, tile in enumerate(lefts):
            at = _moved(builder, given.a, (given.a_tile, i), (given.a_chunk, loop.index))
            tile_call(builder, "tileloadd64", tile, pointer(builder, at), given.a_row)
        for j, tile in enumerate(rights):
            at = _moved(builder, given.b, (given.b_tile, j), (given.b_chunk, loop.index))
            tile_call(builder, "tileloadd64", tile, pointer(builder, at), given.b_row)
        for (i, j), tile in sums.items():
            tile_call(builder, "tdpbf16ps", tile, lefts[i], rights[j])
    for ij, tile in sums.items():
        tile_call(builder, "tilestored64", tile, places[ij], given.c_row)


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
                a=_moved(builder, given.a, (given.a_tile, tile), (given.a_row, row)),
                c=_moved(builder, given.c, (given.c_i, tile), (given.c_row, row)),
            )
            self._block(builder, block, rows, shape)

    def _block(self, builder: Any, given: Product, rows: int, shape: Shape) -> None:
        places = [
            pointer(builder, _moved(builder, given.c, (given.c_row, r), (given.c_j, j)), VECTOR)
            for r in range(rows)
            for j in range(shape.b_tiles)
        ]
        sums = [cgutils.alloca_once(builder, VECTOR) for _ in places]  # registers, once optimized
        for own, place in zip(sums, places, strict=True):
            start = builder.load(place, align=4) if shape.adds else ir.Constant(VECTOR, None)
            builder.store(start, own)
        with cgutils.for_range(builder, given.chunks, intp=INT) as loop:
            lines = [
                _moved(builder, given.a, (given.a_row, r), (given.a_chunk, loop.index))
                for r in range(rows)
            ]
            tiles = [
                _moved(builder, given.b, (given.b_tile, j), (given.b_chunk, loop.index))
                for j in range(shape.b_tiles)
            ]
            for entry in range(TILE):
                at = [_moved(builder, tile, (given.b_row, entry)) for tile in tiles]
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
    "amx": Unit(16.0, 2, _on_tiles),
    "avx512_bf16": Unit(_DOT_SPEEDUP, 2, _Vectors(_add_dot)),
    "float32": Unit(1.0, 1, _Vectors(_add_product)),
}
