"""Products of whole tiles of rows with a group of a panel on matrix units (AMX)."""

from __future__ import annotations

from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from mtp_kernels.cpu.code import (
    FLOAT,
    INT,
    PAIRS,
    VECTOR,
    by_count,
    bytes_of,
    fma,
    integer,
    load,
    loop,
    splat,
    store,
)
from mtp_kernels.cpu.group_sums import WHOLE, old_or_zeros, scales_at
from mtp_kernels.cpu.jit import inner
from mtp_kernels.cpu.matrix_units import ROW_BYTES, TILE, Product, Shape, multiply_tiles
from mtp_kernels.cpu.nibbles import int4_bytes
from mtp_kernels.cpu.panel_forms import INT4, SCALE_BYTES, STEP_ROWS
from mtp_kernels.cpu.stored_rows import STORED

MOST_ROWS = 128  # of a panel, which `area` holds expanded
_MOST_TILES = 2
_CODES = types.int8  # the type of a product's `kind` for codes of inputs; else one of STORED's
_BYTES = ir.VectorType(ir.IntType(8), ROW_BYTES)


class TileRows(NamedTuple):
    """Inputs: the address of a row's entries, the bytes from row to row, and for codes the address
    of a row's factor and the bytes from one to the next."""

    at: Any
    step: Any
    factors: Any
    factor_step: Any


class TileWeight(NamedTuple):
    """A group of a panel: the address of lines of two vectors of entries, their number in units of
    a tile's, and the address of their scales."""

    at: Any
    chunks: Any
    scales: Any


@intrinsic
def area(typing: Any) -> Any:
    """Return the address of memory for MOST_ROWS rows of a panel as pairs, which the caller has."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _on_stack(builder, MOST_ROWS // 2)

    return types.int64(), codegen


def _on_stack(builder: Any, lines: int) -> Any:
    """The address of so many lines of two vectors."""
    with builder.goto_entry_block():  # numba's alloca_once would fill it with zeros each time
        memory = builder.alloca(ir.ArrayType(ir.IntType(8), lines * SCALE_BYTES))
    memory.align = ROW_BYTES
    return builder.ptrtoint(memory, INT)


@inner
def multiply_whole_tiles(
    x: Any, count: Any, kind: Any, w: Any, out: Any, stride: Any, add: Any
) -> Any:
    """Write out[r, :PANEL] = the products of TileRows x and a TileWeight, for all whole tiles of
    `count` rows; added to if `add`. Return the number of rows that are done."""
    row = 0
    while count - row >= TILE:
        tiles = min((count - row) // TILE, _MOST_TILES)
        own = x.at + row * x.step, x.step, x.factors + row * x.factor_step, x.factor_step
        _tile_product(own, tiles, kind, w, out + 4 * row * stride, stride, add)
        row += tiles * TILE
    return row


@intrinsic
def _tile_product(
    typing: Any, x: Any, tiles: Any, kind: Any, w: Any, out: Any, stride: Any, add: Any
) -> Any:
    """multiply_whole_tiles for one tile or two; the type of `kind` is what is multiplied."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, w = (cgutils.unpack_tuple(builder, arguments[place]) for place in (0, 3))
        tiles, kind, (out, stride, add) = arguments[1], signature.args[2], arguments[4:]
        sums, line = _on_stack(builder, _MOST_TILES * TILE), integer(SCALE_BYTES)
        tile, chunk = integer(TILE * SCALE_BYTES), integer(ROW_BYTES)
        instruction = "tdpbssd" if kind == _CODES else "tdpbf16ps"

        def code(count: int) -> None:
            rows = x[0], x[1], builder.mul(x[1], integer(TILE)), chunk
            given = Product(*rows, w[0], line, chunk, tile, w[1], sums, line, tile, chunk)
            multiply_tiles(instruction, builder, given, Shape(count, len(WHOLE), adds=False))

        by_count(builder, tiles, range(1, _MOST_TILES + 1), code)
        adds, out_bytes = builder.icmp_signed("!=", add, integer(0)), bytes_of(builder, stride)
        lines = _lines(builder, kind, w[2])

        def finish(row: Any, nothing: list[Any]) -> list[Any]:
            made = builder.add(sums, builder.mul(row, line))
            to = builder.add(out, builder.mul(row, out_bytes))
            outs = _columns(builder, to)
            old = old_or_zeros(builder, outs, adds)
            parts = _columns(builder, made)
            if kind == _CODES:
                at = builder.add(x[2], builder.mul(row, x[3]))
                factor = splat(builder, load(builder, at, FLOAT))
                whole = [builder.sitofp(load(builder, at, PAIRS), VECTOR) for at in parts]
                values = [builder.fmul(value, factor) for value in whole]
            else:
                values = [load(builder, at, VECTOR) for at in parts]
            for c, at in enumerate(outs):
                total = builder.fadd(values[c], old[c])
                if lines:
                    total = fma(builder, values[c], lines[c], old[c])
                store(builder, total, at)
            return nothing

        loop(builder, builder.mul(tiles, integer(TILE)), [], finish)
        return context.get_dummy_value()

    return types.void(x, types.int64, kind, w, *[types.int64] * 3), codegen


def _lines(builder: Any, kind: Any, scales: Any) -> list[Any]:
    """Vectors of the scales at an address, of a kind that has some."""
    if kind != _CODES and not STORED[kind].has_scales:
        return []
    factor = 1.0 if kind == _CODES else STORED[kind].factor
    return scales_at(builder, factor, _columns(builder, scales))


def _columns(builder: Any, at: Any) -> list[Any]:
    """Addresses of both vectors of a line."""
    return [builder.add(at, integer(c * ROW_BYTES)) for c in WHOLE]


@intrinsic
def expand_int4(typing: Any, w: Any, rows: Any, out: Any) -> Any:
    """Write rows of int4 as bytes: of every eight a line of the even ones, and one of the odd."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        w, rows, out = arguments
        eights = ir.Constant(_BYTES, [8] * _BYTES.count)

        def step(number: Any, nothing: list[Any]) -> list[Any]:
            at = builder.add(w, builder.mul(number, integer(SCALE_BYTES)))
            to = builder.add(out, builder.mul(number, integer(2 * SCALE_BYTES)))
            for c, column in enumerate(_columns(builder, at)):
                word = load(builder, column, PAIRS)
                for odd, unsigned in enumerate(int4_bytes(builder, word)):
                    codes = builder.sub(builder.bitcast(unsigned, _BYTES), eights)
                    place = integer(odd * SCALE_BYTES + c * ROW_BYTES)
                    store(builder, codes, builder.add(to, place))
            return nothing

        loop(builder, builder.udiv(rows, integer(STEP_ROWS[INT4])), [], step)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen
