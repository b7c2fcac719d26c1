"""The Triton kernel of products with stored weights, plain and grouped by expert.

n rows of a weight (outputs), k its columns. A program makes one tile of the result: ROWS rows of x
with the weight of one expert, times COLUMNS outputs. Codes are converted to the dtype of x, which
holds each of them exactly, and multiplied as they are; scales meet the float32 sums, those of
blocks and groups step by step along k, those of a channel once at the end. Dense weights have none.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mtp_kernels.gpu.triton_kernels import from_fp8


@triton.jit
def from_e4m3(codes, dtype: tl.constexpr):
    """Values of e4m3 codes: fp8 by the device's conversion, bytes by their bits."""
    if codes.dtype == tl.uint8:
        # As the exponent and mantissa of float16, whose bias is larger by 8; subnormals too.
        halves = ((codes & 0x80).to(tl.uint16) << 8) | ((codes & 0x7F).to(tl.uint16) << 7)
        values = halves.to(tl.float16, bitcast=True) * 256.0
        values = tl.where((codes & 0x7F) == 0x7F, float("nan"), values).to(dtype)
    else:
        values = from_fp8(codes, dtype)
    return values


@triton.jit
def from_integers(codes, ZERO: tl.constexpr, dtype: tl.constexpr):
    """Values of unsigned codes below 2^23, less ZERO.

    As the last bits of a float32 from 2^23 on, whose unit is 1: conversions of integers have a
    fraction of the throughput.
    """
    floats = (codes.to(tl.uint32) | 0x4B000000).to(tl.float32, bitcast=True)
    return (floats - (8388608.0 + ZERO)).to(dtype)


@triton.jit
def from_nibbles(pairs, FLIP: tl.constexpr, dtype: tl.constexpr):
    """Numbers [n, p, 2] of pairs [n, p] of nibbles, the even column's low; a nibble xor FLIP is
    the code + 8."""
    if dtype == tl.float32:
        low = from_integers((pairs & 15) ^ FLIP, 8, dtype)
        high = from_integers((pairs >> 4) ^ FLIP, 8, dtype)
    else:
        # The same in 16 bits, whose unit is 1 from 128 on (bfloat16) or 1024: both at a time.
        ONES: tl.constexpr = 0x4300 if dtype == tl.bfloat16 else 0x6400
        ZERO: tl.constexpr = 136.0 if dtype == tl.bfloat16 else 1032.0
        wide = pairs.to(tl.uint32)
        nibbles = (wide | (wide << 12)) & 0x000F000F
        both = (nibbles ^ (FLIP * 0x10001)) | (ONES * 0x10001)
        low = (both & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True)
        high = (both >> 16).to(tl.uint16).to(dtype, bitcast=True)
        zero = tl.full((), ZERO, dtype)
        low -= zero
        high -= zero
    return tl.join(low, high)


@triton.jit
def load_codes(
    codes, n, k, inside_n, width, FORM: tl.constexpr, FLIP: tl.constexpr, STEP: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """The codes of rows n and STEP columns from k on, as numbers [n, k], finite outside it."""
    PACKED: tl.constexpr = 2 if FORM == "int4" else 1
    columns = k // PACKED + tl.arange(0, STEP // PACKED)
    inside = inside_n[:, None] & (columns < width)[None, :]
    stored = tl.load(codes + n[:, None] * width + columns[None, :], mask=inside, other=0.0)
    if FORM == "int4":
        numbers = tl.reshape(from_nibbles(stored, FLIP, dtype), (n.shape[0], STEP))
    elif FORM == "int8":
        numbers = from_integers(stored, 128, dtype)
    elif FORM == "dense":
        numbers = stored.to(dtype)
    else:
        numbers = from_e4m3(stored, dtype)
    return numbers


@triton.jit(do_not_specialize=["count", "steps"])
def product_kernel(
    x, rows, ends, codes, scale, y, count, N, K, width, steps,
    EXPERTS: tl.constexpr, EXPERTS_POW2: tl.constexpr, FORM: tl.constexpr, FLIP: tl.constexpr,
    SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """y[s, p] = x[rows[p]] @ weight[e(p)].T over share s of the columns, where pairs p below
    ends[0] are expert 0's, and so on.

    rows None: row p of x; EXPERTS 0: one weight, and no ends. Tiles are counted expert by expert,
    so that programs past the last tile, which the host cannot know, end at once. SCALE_COLUMNS 0:
    one scale per weight row. width: stored elements of a weight row. A share has STEP * steps
    columns.
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
        k_start = tl.program_id(2) * steps * STEP  # by which loads are known to be aligned
        sums = sums_of(
            x + row.to(tl.int64)[:, None] * K, exists, codes, scale, n, inside_n, K, width,
            k_start, tl.minimum(k_start + steps * STEP, K), FORM, FLIP, SCALE_ROWS,
            SCALE_COLUMNS, ROWS, COLUMNS, STEP, STAGES,
        )  # fmt: skip
        y_rows = tl.program_id(2).to(tl.int64) * count + p
        at = y + y_rows[:, None] * N + n[None, :]
        tl.store(at, sums.to(y.dtype.element_ty), mask=exists[:, None] & inside_n[None, :])


@triton.jit(do_not_specialize=["size"])
def add_shares_kernel(shares, y, size, SHARES: tl.constexpr, BLOCK: tl.constexpr):
    """y[i] = the sum of shares[:, i], float32, in their order."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    sums = tl.zeros([BLOCK], tl.float32)
    for _ in tl.static_range(SHARES):
        sums += tl.load(shares + i, mask=inside, other=0.0)
        shares += size
    tl.store(y + i, sums.to(y.dtype.element_ty), mask=inside)


@triton.jit
def sums_of(
    x_rows, exists, codes, scale, n, inside_n, K, width, k_start, k_end, FORM: tl.constexpr,
    FLIP: tl.constexpr, SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The scaled sums over columns k_start to k_end of one tile [ROWS, COLUMNS], float32."""
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    n_wide = n.to(tl.int64)
    # Blocks hold whole tiles: one scale for all of a tile's rows.
    scale_n = tl.program_id(1) * COLUMNS // SCALE_ROWS if SCALE_ROWS > 1 else n
    for k in tl.range(k_start, k_end, STEP, num_stages=STAGES):
        columns = k + tl.arange(0, STEP)
        inside = exists[:, None] & (columns < K)[None, :]
        inputs = tl.load(x_rows + columns[None, :], mask=inside, other=0.0)
        weights = load_codes(codes, n_wide, k, inside_n, width, FORM, FLIP, STEP, inputs.dtype)
        if SCALE_COLUMNS > 0:
            at = scale + scale_n * tl.cdiv(K, SCALE_COLUMNS) + k // SCALE_COLUMNS
            if SCALE_ROWS > 1:
                multiplier = tl.load(at).to(tl.float32)
            else:
                multiplier = tl.load(at, mask=inside_n, other=0.0).to(tl.float32)[None, :]
            sums += tl.dot(inputs, tl.trans(weights), input_precision="ieee") * multiplier
        else:
            sums = tl.dot(inputs, tl.trans(weights), sums, input_precision="ieee")
    if SCALE_COLUMNS == 0 and FORM != "dense":
        sums *= tl.load(scale + n, mask=inside_n, other=0.0).to(tl.float32)[None, :]
    return sums
