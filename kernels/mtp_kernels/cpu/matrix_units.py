"""Matrix units (AMX): products of tiles of 16 rows of 64 bytes.

An entry of a row is 32 bits: a pair of bf16, or four bytes. Row k of the second operand's tile
holds the terms of 16 sums that meet entry k of a row of the first operand's; the tile of sums has a
row for each of these. A thread sets its tiles up by `configure`, and gives them back by `release`.
Addresses are int64, and strides and steps are bytes.

Sources: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18; Linux's
Documentation/arch/x86/xstate.rst on the permission that a process asks for.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, NamedTuple

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from mtp_kernels.cpu.code import INT, LANES, integer

TILE = LANES  # rows of a tile, and 32-bit entries of a row
ROW_BYTES = 64
TILE_BYTES = TILE * ROW_BYTES
ENTRY_BYTES = 4

_ARCH_PRCTL, _ASK_PERMISSION, _TILE_DATA = 158, 0x1023, 18  # numbers of Linux on x86-64


def _tiles_permitted() -> bool:
    """Return True where this CPU has tiles of bytes and of bf16, and Linux lets this process have
    them."""
    features = binding.get_host_cpu_features()
    if not all(features.get(name) for name in ("amx-tile", "amx-int8", "amx-bf16")):
        return False
    answer: int = ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ASK_PERMISSION, _TILE_DATA)
    return answer == 0


HAS_TILES = _tiles_permitted()

_TILES = 8
_BYTE = ir.IntType(8)
_CONFIG = (
    bytes([1]).ljust(16, b"\0")  # the palette
    + (ROW_BYTES.to_bytes(2, "little") * _TILES).ljust(32, b"\0")
    + (bytes([TILE]) * _TILES).ljust(16, b"\0")
)


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


def moved(builder: Any, base: Any, *moves: tuple[Any, Any]) -> Any:
    """Return base + step * count of each move."""
    for step, count in moves:
        count = integer(count) if isinstance(count, int) else count
        base = builder.add(base, builder.mul(step, count))
    return base


def pointer(builder: Any, address: Any, kind: Any = _BYTE) -> Any:
    """Return an address as a pointer to a kind."""
    return builder.inttoptr(address, kind.as_pointer())


def tile_call(builder: Any, name: str, *operands: Any) -> None:
    """Emit an instruction on tiles; an int is the number of a tile."""
    values = [ir.Constant(_BYTE, o) if isinstance(o, int) else o for o in operands]
    kind = ir.FunctionType(ir.VoidType(), [value.type for value in values])
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}")
    builder.call(function, values)


def multiply_tiles(instruction: str, builder: Any, given: Product, shape: Shape) -> None:
    """Multiply by an instruction, on at most eight tiles: c first, row by row, then a, then b."""
    a_tiles, b_tiles = range(shape.a_tiles), range(shape.b_tiles)
    sums = {(i, j): i * shape.b_tiles + j for i in a_tiles for j in b_tiles}
    lefts = [len(sums) + i for i in a_tiles]
    rights = [len(sums) + shape.a_tiles + j for j in b_tiles]
    places = {
        (i, j): pointer(builder, moved(builder, given.c, (given.c_i, i), (given.c_j, j)))
        for i, j in sums
    }
    for ij, tile in sums.items():
        if shape.adds:
            tile_call(builder, "tileloadd64", tile, places[ij], given.c_row)
        else:
            tile_call(builder, "tilezero", tile)
    with cgutils.for_range(builder, given.chunks, intp=INT) as loop:
        for i, tile in enumerate(lefts):
            at = moved(builder, given.a, (given.a_tile, i), (given.a_chunk, loop.index))
            tile_call(builder, "tileloadd64", tile, pointer(builder, at), given.a_row)
        for j, tile in enumerate(rights):
            at = moved(builder, given.b, (given.b_tile, j), (given.b_chunk, loop.index))
            tile_call(builder, "tileloadd64", tile, pointer(builder, at), given.b_row)
        for (i, j), tile in sums.items():
            tile_call(builder, instruction, tile, lefts[i], rights[j])
    for ij, tile in sums.items():
        tile_call(builder, "tilestored64", tile, places[ij], given.c_row)


@intrinsic
def configure(typing: Any) -> Any:
    """Set up this thread's tiles, eight full ones; `release` ends it."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if HAS_TILES:
            content = ir.Constant(ir.ArrayType(_BYTE, len(_CONFIG)), bytearray(_CONFIG))
            config = cgutils.global_constant(builder, "tile_config", content)
            tile_call(builder, "ldtilecfg", builder.bitcast(config, _BYTE.as_pointer()))
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def release(typing: Any) -> Any:
    """Give back this thread's tiles."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if HAS_TILES:
            tile_call(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), codegen
