"""Products of bf16 tiles on a CPU's matrix unit (AMX), and the packing of numbers into tiles.

A tile is 16 rows of 64 bytes. One instruction multiplies 16 x 32 bf16 by 32 x 16 and adds to
16 x 16 float32; its second operand holds pairs of rows entry by entry. Addresses are int64, and
strides and steps are bytes, here and in whoever calls.

Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

TILE = 16  # rows of a tile, and 32-bit entries of a row
DEPTH = 32  # bf16 entries of a row: the terms one instruction sums
ROW_BYTES = 64
TILE_BYTES = TILE * ROW_BYTES

_BYTE, _SHORT, _NUMBER = ir.IntType(8), ir.IntType(16), ir.IntType(32)
_INT = ir.IntType(64)
_POINTER = _BYTE.as_pointer()
_LINE = ir.VectorType(_NUMBER, TILE)
_HALVES = ir.VectorType(_SHORT, DEPTH)


def has_tiles() -> bool:
    """Return True where the CPU multiplies bf16 tiles and the system lets this process use them."""
    return torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx()


def tile_config() -> Any:
    """Return the operand of `configure`: eight full tiles."""
    config = np.zeros(ROW_BYTES, np.uint8)
    config[0] = 1  # the palette
    config[16:32].view(np.uint16)[:] = ROW_BYTES
    config[48:56] = TILE
    return config


def _int(value: int) -> Any:
    return ir.Constant(_INT, value)


def _tile_call(builder: Any, name: str, *operands: Any) -> None:
    """Emit an instruction on tiles; an int is the number of a tile."""
    values = [ir.Constant(_BYTE, o) if isinstance(o, int) else o for o in operands]
    kind = ir.FunctionType(ir.VoidType(), [value.type for value in values])
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}")
    builder.call(function, values)


def _pointer(builder: Any, address: Any, kind: Any = _BYTE) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def _vector(builder: Any, address: Any, kind: Any) -> Any:
    return builder.load(_pointer(builder, address, kind), align=2)


def _mix(builder: Any, a: Any, b: Any, order: list[int]) -> Any:
    mask = ir.Constant(ir.VectorType(_NUMBER, len(order)), order)
    return builder.shuffle_vector(a, b, mask)


@intrinsic
def configure(typing: Any, config: Any) -> Any:
    """Set up this thread's tiles from the address of a `tile_config`; `release` ends it."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _tile_call(builder, "ldtilecfg", _pointer(builder, arguments[0]))
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def release(typing: Any) -> Any:
    """Give back this thread's tiles."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _tile_call(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), codegen


def _moved(builder: Any, base: Any, *moves: tuple[Any, Any]) -> Any:
    """Return base + step * count of each move."""
    for step, count in moves:
        count = _int(count) if isinstance(count, int) else count
        base = builder.add(base, builder.mul(step, count))
    return _pointer(builder, base)


def _multiply(a_tiles: int, b_tiles: int, adds: bool) -> Any:
    """Return the code of a product. Its tiles: c first, row by row, then a, then b."""
    sums = {(i, j): i * b_tiles + j for i in range(a_tiles) for j in range(b_tiles)}
    lefts = [len(sums) + i for i in range(a_tiles)]
    rights = [len(sums) + a_tiles + j for j in range(b_tiles)]

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        a, a_row, a_tile, a_chunk, b, b_tile, b_chunk, chunks, c, c_row, c_i, c_j = arguments
        places = {ij: _moved(builder, c, (c_i, ij[0]), (c_j, ij[1])) for ij in sums}
        for ij, tile in sums.items():
            if adds:
                _tile_call(builder, "tileloadd64", tile, places[ij], c_row)
            else:
                _tile_call(builder, "tilezero", tile)
        with cgutils.for_range(builder, chunks, intp=_INT) as loop:
            for i, tile in enumerate(lefts):
                place = _moved(builder, a, (a_tile, i), (a_chunk, loop.index))
                _tile_call(builder, "tileloadd64", tile, place, a_row)
            for j, tile in enumerate(rights):
                place = _moved(builder, b, (b_tile, j), (b_chunk, loop.index))
                _tile_call(builder, "tileloadd64", tile, place, _int(ROW_BYTES))
            for (i, j), tile in sums.items():
                _tile_call(builder, "tdpbf16ps", tile, lefts[i], rights[j])
        for ij, tile in sums.items():
            _tile_call(builder, "tilestored64", tile, places[ij], c_row)
        return context.get_dummy_value()

    return codegen


def _product(a_tiles: int, b_tiles: int, adds: bool) -> Any:
    """c[i, j] = (c[i, j] +) sum over chunks of a[i] @ b[j]: at most eight tiles in all.

    Of each an address, a step from tile to tile, and of a and b one from chunk to chunk; rows of b
    follow each other, those of a and c lie a stride apart; c has a step for i and one for j.
    """

    def product(
        typing: Any,
        a: Any,
        a_row: Any,
        a_tile: Any,
        a_chunk: Any,
        b: Any,
        b_tile: Any,
        b_chunk: Any,
        chunks: Any,
        c: Any,
        c_row: Any,
        c_i: Any,
        c_j: Any,
    ) -> Any:
        return types.void(*[types.int64] * 12), _multiply(a_tiles, b_tiles, adds)

    return intrinsic(product)


product_2_2, product_2_1 = _product(2, 2, False), _product(2, 1, False)
add_product_2_2, add_product_1_2 = _product(2, 2, True), _product(1, 2, True)


@intrinsic
def transpose(typing: Any, source: Any, stride: Any, target: Any) -> Any:
    """Transpose 16 lines of 16 32-bit entries, `stride` bytes apart, into the tile at `target`."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, stride, target = arguments
        lines = [
            _vector(builder, builder.add(source, builder.mul(stride, _int(i))), _LINE)
            for i in range(TILE)
        ]
        # Four rounds of perfect shuffles: line i of the next round takes from lines i and i + 8.
        low = [half for i in range(TILE // 2) for half in (i, TILE + i)]
        high = [TILE // 2 + entry for entry in low]
        for _ in range(4):
            pairs = [(lines[i], lines[i + TILE // 2]) for i in range(TILE // 2)]
            lines = [_mix(builder, a, b, order) for a, b in pairs for order in (low, high)]
        for i, line in enumerate(lines):
            place = builder.add(target, _int(i * ROW_BYTES))
            builder.store(line, _pointer(builder, place, _LINE), align=4)
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
            place = builder.add(arguments[2], _int(number * TILE_BYTES))
            line = _mix(builder, first, second, order)
            builder.store(line, _pointer(builder, place, _HALVES), align=2)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen
