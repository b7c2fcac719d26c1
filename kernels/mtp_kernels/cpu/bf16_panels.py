"""Products of inputs rounded to bf16 with panels of bf16, int8, int4 or fp8: products of pairs,
which are exact, added in float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from mtp_kernels.cpu.bf16_dots import lower_and_upper
from mtp_kernels.cpu.code import (
    FLOAT_BYTES,
    LANES,
    PAIRS,
    every_word,
    integer,
    load,
    loop,
    store,
)
from mtp_kernels.cpu.group_sums import expand
from mtp_kernels.cpu.jit import inner
from mtp_kernels.cpu.matrix_units import HAS_TILES, ROW_BYTES, TILE
from mtp_kernels.cpu.panel_forms import (
    BF16,
    INT4,
    INT8,
    PANEL,
    SCALE_BYTES,
    STEP_ROWS,
    group_bytes,
    group_of,
    kind_of,
)
from mtp_kernels.cpu.panels import BY_TWOS, product
from mtp_kernels.cpu.stored_rows import OF_FP8, OF_INT4, OF_INT8, OF_PAIRS
from mtp_kernels.cpu.tile_products import (
    MOST_ROWS,
    TileRows,
    TileWeight,
    area,
    multiply_whole_tiles,
)
from mtp_kernels.cpu.vectors import Rows, address, floats, from_column, rows_of, words

_MOST_ROWS = BY_TWOS[-1]
_TILE_DEPTH = ROW_BYTES // 2  # inputs of a row of a tile


@inner
def pair_rows(x: Any, form: Any, out: Any) -> Any:
    """Write Rows x to pairs out [count, depth / 2] as products with a form take them; return Rows
    of these. Input k of a step is paired with the one half a step on."""
    kind = kind_of(form)
    for r in range(out.shape[0]):
        row, own = x.at + FLOAT_BYTES * r * x.stride, address(out) + FLOAT_BYTES * r * out.shape[1]
        if kind == BF16:
            _pair_row(row, _NEXT, out.shape[1], own)
        elif kind == INT4:
            _pair_row(row, _FOURTH_NEXT, out.shape[1], own)
        else:
            _pair_row(row, _SECOND_NEXT, out.shape[1], own)
    return rows_of(out)


# Types that say how far on the other input of a pair is.
_NEXT, _SECOND_NEXT, _FOURTH_NEXT = np.int8(0), np.int16(0), np.int32(0)
_FURTHER = {
    types.int8: 1,
    types.int16: STEP_ROWS[INT8] // 2,
    types.int32: STEP_ROWS[INT4] // 2,
}


@inner
def _pair_row(row: Any, further: Any, pairs: Any, out: Any) -> None:
    """Write the pairs of a row at an address to another."""
    whole = pairs // LANES * LANES
    if whole:
        _write_pairs(row, further, whole // LANES, out)
    if whole < pairs:
        last, made = np.zeros(2 * LANES, np.float32), np.empty(LANES, np.uint32)
        _write_last(row, further, whole, pairs, (last, made), out)


@inner
def _write_last(row: Any, further: Any, whole: Any, pairs: Any, arrays: Any, out: Any) -> None:
    """Write the pairs past the last whole vector, by arrays that the caller keeps."""
    last, made = arrays
    numbers = carray(floats(row), (2 * pairs,))
    for k in range(2 * whole, 2 * pairs):
        last[k - 2 * whole] = numbers[k]
    _write_pairs(address(last), further, 1, address(made))
    for pair in range(whole, pairs):
        carray(words(out), (pairs,))[pair] = made[pair - whole]


@intrinsic
def _write_pairs(typing: Any, row: Any, further: Any, vectors: Any, out: Any) -> Any:
    """Write so many vectors of the pairs of a row; the type of `further` is one of _FURTHER."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        row, _, vectors, out = arguments
        step = _FURTHER[signature.args[1]]
        lower = [pair // step * step + pair for pair in range(LANES)]

        def write(number: Any, nothing: list[Any]) -> list[Any]:
            at = builder.add(row, builder.mul(number, integer(2 * LANES * FLOAT_BYTES)))
            places = at, builder.add(at, integer(LANES * FLOAT_BYTES))
            both = [_rounded(builder, load(builder, place, PAIRS)) for place in places]
            halves = [
                builder.shuffle_vector(*both, ir.Constant(PAIRS, [k + moved for k in lower]))
                for moved in (0, step)
            ]
            first = builder.lshr(halves[0], every_word(16))
            place = builder.add(out, builder.mul(number, integer(LANES * FLOAT_BYTES)))
            store(builder, lower_and_upper(builder, first, halves[1]), place)
            return nothing

        loop(builder, vectors, [], write)
        return context.get_dummy_value()

    return types.void(types.int64, further, types.int64, types.int64), codegen


def _rounded(builder: Any, bits: Any) -> Any:
    """The bits of floats as those of the nearest bf16, of two the even one; NaN stays one."""
    odd = builder.and_(builder.lshr(bits, every_word(16)), every_word(1))
    nearest = builder.add(builder.add(bits, every_word(0x7FFF)), odd)
    size = builder.and_(bits, every_word(0x7FFFFFFF))
    is_nan = builder.icmp_unsigned(">", size, every_word(0x7F800000))
    return builder.select(is_nan, builder.or_(bits, every_word(0x00400000)), nearest)


@inner
def multiply_pairs(x: Any, panel: Any, out: Any, out_stride: Any) -> None:
    """Write out[r, :PANEL] = sum over k of x[r, k] * panel[k] for Rows of pairs x and a Panel."""
    kind = kind_of(panel.form)
    if kind == BF16:
        weight = Rows(panel.at, PANEL, panel.count)
        _multiply(x, weight, (OF_PAIRS,), 0, out, out_stride, 0)
        return
    group, scales = group_of(panel.form), panel.at
    for first in range(0, panel.count, group):
        part = from_column(x, first // 2)
        codes = Rows(scales + SCALE_BYTES, PANEL, min(group, panel.count - first))
        if kind == INT4:
            _multiply(part, codes, (OF_INT4,), scales, out, out_stride, first)
        elif kind == INT8:
            _multiply(part, codes, (OF_INT8,), scales, out, out_stride, first)
        else:
            _multiply(part, codes, (OF_FP8,), scales, out, out_stride, first)
        scales += group_bytes(panel.form)


@inner
def _multiply(x: Any, w: Any, kind: Any, scales: Any, out: Any, stride: Any, add: Any) -> None:
    """Multiply all rows, up to _MOST_ROWS together where there are no matrix units for them."""
    row, rows = 0, _MOST_ROWS
    if HAS_TILES:
        row = _multiply_tiles(x, w, kind, scales, out, stride, add)
    while row < x.count:
        while rows > x.count - row:
            rows //= 2
        at, own = x.at + FLOAT_BYTES * row * x.stride, out + FLOAT_BYTES * row * stride
        product(at, x.stride, rows, w.at, w.stride, kind, scales, w.count, own, stride, add)
        row += rows


@inner
def _multiply_tiles(x: Any, w: Any, kind: Any, scales: Any, out: Any, stride: Any, add: Any) -> Any:
    """Multiply whole tiles of rows on matrix units; return the number of these rows."""
    if x.count < TILE or w.count % _TILE_DEPTH:
        return 0
    pairs: Any = area()
    row_bytes, done = FLOAT_BYTES * x.stride, 0
    for first in range(0, w.count, MOST_ROWS):
        count = min(w.count - first, MOST_ROWS)
        expand(w.at, kind, first, count, pairs)
        rows = TileRows(from_column(x, first // 2).at, row_bytes, 0, 0)
        part = TileWeight(pairs, count // _TILE_DEPTH, scales)
        done = multiply_whole_tiles(rows, x.count, kind, part, out, stride, add + first)
    return done
