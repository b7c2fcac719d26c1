"""The Triton kernel of products with stored weights, plain and grouped by expert.

n rows of a weight (outputs), k its columns. A program makes one tile of the result: ROWS rows of x
with the weight of one expert, times COLUMNS outputs. Codes are converted to the dtype of x, which
holds each of them exactly, and multiplied as they are; scales meet the float32 sums, those of
blocks and groups step by step along k, those of a channel once at the end. Dense weights have none.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def from_e4m3(codes, DTYPE: tl.constexpr):
    """Values of e4m3 codes: fp8 by the device's conversion, bytes by their bits."""
    if codes.dtype == tl.uint8:
        # As the exponent and mantissa of float16, whose bias is larger by 8; subnormals too.
        halves = ((codes & 0x80).to(tl.uint16) << 8) | ((codes & 0x7F).to(tl.uint16) << 7)
        values = halves.to(tl.float16, bitcast=True) * 256.0
        values = tl.where((codes & 0x7F) == 0x7F, float("nan"), values)
    else:
        values = codes
    return values.to(DTYPE)


@triton.jit
def load_codes(
    codes, n, k, inside_n, N, K, FORM: tl.constexpr, FLIP: tl.constexpr, STEP: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """The codes of rows n and STEP columns from k on, as numbers [n, k]; 0 outside the weight."""
    columns = k + tl.arange(0, STEP)
    if FORM == "int4":
        pairs = k // 2 + tl.arange(0, STEP // 2)
        inside = inside_n[:, None] & (pairs < K // 2)[None, :]
        # A nibble xor FLIP is the code + 8.
        stored = tl.load(codes + n[:, None] * (K // 2) + pairs[None, :], mask=inside, other=0)
        low = ((stored & 15) ^ FLIP).to(tl.int32) - 8
        high = ((stored >> 4) ^ FLIP).to(tl.int32) - 8
        numbers = tl.reshape(tl.join(low, high), (n.shape[0], STEP)).to(DTYPE)
    else:
        inside = inside_n[:, None] & (columns < K)[None, :]
        address = codes + n[:, None] * K + columns[None, :]
        if FORM == "int8":
            numbers = (tl.load(address, mask=inside, other=128).to(tl.int32) - 128).to(DTYPE)
        elif FORM == "dense":
            numbers = tl.load(address, mask=inside, other=0.0).to(DTYPE)
        else:
            numbers = from_e4m3(tl.load(address, mask=inside, other=0.0), DTYPE)
    return numbers


@triton.jit
def product_kernel(
    x, rows, ends, codes, scale, y, count, N, K,
    EXPERTS: tl.constexpr, EXPERTS_POW2: tl.constexpr, FORM: tl.constexpr, FLIP: tl.constexpr,
    SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """y[p] = x[rows[p]] @ weight[e(p)].T, where pairs p below ends[0] are expert 0's, and so on.

    rows None: row p of x; EXPERTS 0: one weight, and no ends. Tiles are counted expert by expert,
    so that programs past the last tile, which the host cannot know, end at once. SCALE_COLUMNS 0:
    one scale per weight row.
    """
    tile = tl.program_id(0)
    first, end = tile * ROWS, count
    if EXPERTS > 0:
        e = tl.arange(0, EXPERTS_POW2)
        expert_end = tl.load(ends + e, mask=e < EXPERTS, other=0)
        expert_start = tl.load(ends + e - 1, mask=(e > 0) & (e < EXPERTS), other=0)
        tiles = tl.where(e < EXPERTS, tl.cdiv(expert_end - expert_start, ROWS), 0)
        tile_ends = tl.cumsum(tiles)
        expert = tl.sum(((tile_ends <= tile) & (e < EXPERTS)).to(tl.int32))
        mine = e == expert
        before = tl.sum(tl.where(mine, tile_ends - tiles, 0))
        first = tl.sum(tl.where(mine, expert_start, 0)) + (tile - before) * ROWS
        end = tl.sum(tl.where(mine, expert_end, 0))  # 0 past the last tile
        width = K // 2 if FORM == "int4" else K
        codes += expert.to(tl.int64) * N * width
        if FORM != "dense":
            scale_columns = tl.cdiv(K, SCALE_COLUMNS) if SCALE_COLUMNS > 0 else 1
            scale += expert.to(tl.int64) * tl.cdiv(N, SCALE_ROWS) * scale_columns
    if first < end:
        p = first + tl.arange(0, ROWS)
        exists = p < end
        row = p
        if rows is not None:
            row = tl.load(rows + p, mask=exists, other=0)
        n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside_n = n < N
        sums = sums_of(
            x + row.to(tl.int64)[:, None] * K, exists, codes, scale, n, inside_n, N, K, FORM, FLIP,
            SCALE_ROWS, SCALE_COLUMNS, ROWS, COLUMNS, STEP, STAGES,
        )  # fmt: skip
        at = y + p.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(at, sums.to(y.dtype.element_ty), mask=exists[:, None] & inside_n[None, :])


@triton.jit
def sums_of(
    x_rows, exists, codes, scale, n, inside_n, N, K, FORM: tl.constexpr, FLIP: tl.constexpr,
    SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The scaled sums of one tile [ROWS, COLUMNS], float32."""
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    n_wide = n.to(tl.int64)
    for k in tl.range(0, K, STEP, num_stages=STAGES):
        columns = k + tl.arange(0, STEP)
        inside = exists[:, None] & (columns < K)[None, :]
        inputs = tl.load(x_rows + columns[None, :], mask=inside, other=0.0)
        weights = load_codes(codes, n_wide, k, inside_n, N, K, FORM, FLIP, STEP, inputs.dtype)
        if SCALE_COLUMNS > 0:
            part = tl.dot(inputs, tl.trans(weights), input_precision="ieee")
            at = (n // SCALE_ROWS) * tl.cdiv(K, SCALE_COLUMNS) + k // SCALE_COLUMNS
            sums += part * tl.load(scale + at, mask=inside_n, other=0.0).to(tl.float32)[None, :]
        else:
            sums = tl.dot(inputs, tl.trans(weights), sums, input_precision="ieee")
    if SCALE_COLUMNS == 0 and FORM != "dense":
        sums *= tl.load(scale + n, mask=inside_n, other=0.0).to(tl.float32)[None, :]
    return sums
