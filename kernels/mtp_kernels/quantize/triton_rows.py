"""Triton kernels: a program goes over a few rows, 128 columns per step.

They move bits as the CPU loops do, so that neither the device's conversions nor its rounding
modes matter. Divisions are `div_rn`: Triton's own `/` is approximate.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mtp_kernels.quantize import layouts

BLOCK = tl.constexpr(layouts.BLOCK)
LANES = tl.constexpr(layouts.LANES)
E4M3_MAX = tl.constexpr(layouts.E4M3_MAX)
INT8_MAX = tl.constexpr(layouts.INT8_MAX)
INT4_MIN, INT4_MAX = tl.constexpr(layouts.INT4_MIN), tl.constexpr(layouts.INT4_MAX)
INT4_HALF_RANGE = tl.constexpr(layouts.INT4_HALF_RANGE)
SCALE_FLOOR = tl.constexpr(layouts.SCALE_FLOOR)
ZERO_SCALE = tl.constexpr(layouts.ZERO_SCALE)

ROUNDER = tl.constexpr(1.5 * 2.0**23)
E4M3_ROUNDER = tl.constexpr(2.0**14)
E4M3_ROUNDER_BITS = tl.constexpr(0x46800000)
E4M3_MAX_BITS = tl.constexpr(0x43E00000)
E4M3_NORMAL_BITS = tl.constexpr(0x3C800000)
EXPONENT_SHIFT = tl.constexpr(120 << 23)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
NAN_BITS = tl.constexpr(0x7FC00000)


@triton.jit
def _bits(value):
    return value.to(tl.uint32, bitcast=True)


@triton.jit
def _float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _to_bf16(value):
    bits = _bits(value)
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


@triton.jit
def _from_e4m3(code):
    magnitude = code & 0x7F
    normal = (magnitude << 20) + EXPONENT_SHIFT
    subnormal = _bits(_float(magnitude + E4M3_ROUNDER_BITS) - E4M3_ROUNDER)
    bits = tl.where(magnitude == 0x7F, NAN_BITS, normal)
    bits = tl.where(magnitude < 8, subnormal, bits)
    return _float((bits | ((code & 0x80) << 24)).to(tl.uint32))


@triton.jit
def _to_e4m3(value):
    sign = (_bits(value) >> 24) & 0x80
    magnitude = tl.minimum(_bits(value) & MAGNITUDE, E4M3_MAX_BITS).to(tl.uint32)
    rounded = (magnitude - EXPONENT_SHIFT + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
    subnormal = _bits(_float(magnitude) + E4M3_ROUNDER) - E4M3_ROUNDER_BITS
    return tl.where(magnitude < E4M3_NORMAL_BITS, subnormal, rounded) | sign


@triton.jit
def _load(source, block_scale, rows, columns, n, k):
    """Return the fp32 weights of a tile, by the source's dtype; zeros outside the matrix."""
    inside = (rows < n)[:, None] & (columns < k)[None, :]
    stored = tl.load(source + rows[:, None] * k + columns[None, :], mask=inside, other=0)
    if source.dtype.element_ty == tl.uint8:
        blocks = (rows // BLOCK)[:, None] * tl.cdiv(k, BLOCK) + (columns // BLOCK)[None, :]
        scale = tl.load(block_scale + blocks, mask=inside, other=1.0)
        weights = _from_e4m3(stored.to(tl.uint32)) * scale
    elif source.dtype.element_ty == tl.uint16:
        weights = _float(stored.to(tl.uint32) << 16)
    else:
        weights = stored
    return weights


@triton.jit
def _store(weights, out, rows, columns, n, k):
    """Write a tile in the output's dtype; return the written values as fp32."""
    inside = (rows < n)[:, None] & (columns < k)[None, :]
    address = out + rows[:, None] * k + columns[None, :]
    if out.dtype.element_ty == tl.uint16:
        bits = _to_bf16(weights)
        tl.store(address, bits.to(tl.uint16), mask=inside)
        kept = _float(bits << 16)
    else:
        tl.store(address, weights, mask=inside)
        kept = weights
    return kept


@triton.jit
def _scale(amax_bits, divisor, factor):
    amax = _float(amax_bits)
    ideal = tl.div_rn(amax, tl.full(amax.shape, divisor, tl.float32)) * factor
    return tl.where(amax_bits == 0, ZERO_SCALE, tl.maximum(ideal, SCALE_FLOOR))


@triton.jit
def _bf16_scale(amax_bits, divisor, factor):
    return _float(_to_bf16(_scale(amax_bits, divisor, factor)) << 16)


@triton.jit
def _halve(lanes, count: tl.constexpr):
    """[r, count] to [r], the lower half added to the upper half until one lane is left."""
    width: tl.constexpr = count // 2
    halves = tl.permute(tl.reshape(lanes, (lanes.shape[0], 2, width)), (0, 2, 1))
    lower, upper = tl.split(halves)
    if width == 1:
        total = tl.reshape(lower + upper, (lanes.shape[0],))
    else:
        total = _halve(lower + upper, width)
    return total


@triton.jit
def _add_squares(lanes, values):
    wide = values.to(tl.float64)
    return lanes + wide * wide


@triton.jit
def _store_stats(lanes, errors, largest, signal, error, max_error, rows, n):
    tl.store(signal + rows, _halve(lanes, LANES), mask=rows < n)
    tl.store(error + rows, _halve(errors, LANES), mask=rows < n)
    tl.store(max_error + rows, _float(tl.max(largest, axis=1)), mask=rows < n)


@triton.jit
def dequantize_fp8_block(
    codes,
    block_scale,
    out,
    signal,
    error,
    max_error,
    n,
    k,
    ROWS: tl.constexpr,
):
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    lanes = tl.zeros((ROWS, LANES), tl.float64)
    errors = tl.zeros((ROWS, LANES), tl.float64)
    largest = tl.zeros((ROWS, LANES), tl.uint32)
    for start in range(0, k, LANES):
        columns = start + tl.arange(0, LANES)
        weights = _load(codes, block_scale, rows, columns, n, k)
        difference = weights - _store(weights, out, rows, columns, n, k)
        lanes = _add_squares(lanes, weights)
        errors = _add_squares(errors, difference)
        largest = tl.maximum(largest, _bits(difference) & MAGNITUDE).to(tl.uint32)
    _store_stats(lanes, errors, largest, signal, error, max_error, rows, n)


@triton.jit
def block_scales(source, scale, n, k, power_of_two):
    """Write block scales, one program per block; amax of absolute values is amax of their bits."""
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    largest = tl.zeros((16, BLOCK), tl.uint32)
    for start in range(0, BLOCK, 16):
        rows = (tl.program_id(0) * BLOCK + start + tl.arange(0, 16)).to(tl.int64)
        weights = _load(source, scale, rows, columns, n, k)
        largest = tl.maximum(largest, _bits(weights) & MAGNITUDE).to(tl.uint32)
    amax = tl.max(largest, axis=1)
    bits = _bits(_scale(tl.zeros((1,), tl.uint32) + tl.max(amax, axis=0), E4M3_MAX, 1.0))
    if power_of_two:
        bits = ((bits + 0x7FFFFF) & 0xFF800000).to(tl.uint32)
    index = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1) + tl.arange(0, 1)
    tl.store(scale + index, _float(bits))


@triton.jit
def quantize_fp8_block(
    source,
    scale,
    codes,
    signal,
    error,
    max_error,
    n,
    k,
    ROWS: tl.constexpr,
):
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    lanes = tl.zeros((ROWS, LANES), tl.float64)
    errors = tl.zeros((ROWS, LANES), tl.float64)
    largest = tl.zeros((ROWS, LANES), tl.uint32)
    for start in range(0, k, LANES):
        columns = start + tl.arange(0, LANES)
        inside = (rows < n)[:, None] & (columns < k)[None, :]
        weights = _load(source, scale, rows, columns, n, k)
        block = (rows // BLOCK) * tl.cdiv(k, BLOCK) + start // BLOCK
        multiplier = tl.load(scale + block, mask=rows < n, other=1.0)[:, None]
        code = _to_e4m3(tl.div_rn(weights, tl.broadcast_to(multiplier, weights.shape)))
        address = codes + rows[:, None] * k + columns[None, :]
        tl.store(address, code.to(tl.uint8), mask=inside)
        difference = weights - _from_e4m3(code) * multiplier
        lanes = _add_squares(lanes, weights)
        errors = _add_squares(errors, difference)
        largest = tl.maximum(largest, _bits(difference) & MAGNITUDE).to(tl.uint32)
    _store_stats(lanes, errors, largest, signal, error, max_error, rows, n)


@triton.jit
def quantize_int8_channel(
    source,
    block_scale,
    packed,
    scale,
    signal,
    error,
    max_error,
    n,
    k,
    ROWS: tl.constexpr,
):
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    lanes = tl.zeros((ROWS, LANES), tl.float64)
    errors = tl.zeros((ROWS, LANES), tl.float64)
    largest = tl.zeros((ROWS, LANES), tl.uint32)
    for start in range(0, k, LANES):
        weights = _load(source, block_scale, rows, start + tl.arange(0, LANES), n, k)
        largest = tl.maximum(largest, _bits(weights) & MAGNITUDE).to(tl.uint32)
    multiplier = _bf16_scale(tl.max(largest, axis=1), INT8_MAX, 1.0)
    tl.store(scale + rows, multiplier, mask=rows < n)
    largest = tl.zeros((ROWS, LANES), tl.uint32)
    for start in range(0, k, LANES):
        columns = start + tl.arange(0, LANES)
        inside = (rows < n)[:, None] & (columns < k)[None, :]
        weights = _load(source, block_scale, rows, columns, n, k)
        quotient = tl.div_rn(weights, tl.broadcast_to(multiplier[:, None], weights.shape))
        rounder = quotient + ROUNDER
        code = (_bits(rounder) + 128).to(tl.uint8)
        tl.store(packed + rows[:, None] * k + columns[None, :], code, mask=inside)
        difference = weights - (rounder - ROUNDER) * multiplier[:, None]
        lanes = _add_squares(lanes, weights)
        errors = _add_squares(errors, difference)
        largest = tl.maximum(largest, _bits(difference) & MAGNITUDE).to(tl.uint32)
    _store_stats(lanes, errors, largest, signal, error, max_error, rows, n)


@triton.jit
def _int4_rounder(groups, scale):
    quotient = tl.div_rn(groups, tl.broadcast_to(scale[:, None], groups.shape))
    return tl.minimum(tl.maximum(quotient, INT4_MIN), INT4_MAX) + ROUNDER


@triton.jit
def _group_error(groups, scale, group_size: tl.constexpr):
    difference = groups - (_int4_rounder(groups, scale) - ROUNDER) * scale[:, None]
    wide = difference.to(tl.float64)
    return _halve(wide * wide, group_size)


@triton.jit
def _int4_scale(groups, factors, count: tl.constexpr, group_size: tl.constexpr):
    amax = tl.max((_bits(groups) & MAGNITUDE).to(tl.uint32), axis=1)
    best = _bf16_scale(amax, INT4_HALF_RANGE, tl.load(factors))
    if count > 1:
        least = _group_error(groups, best, group_size)
        for index in range(1, count):
            candidate = _bf16_scale(amax, INT4_HALF_RANGE, tl.load(factors + index))
            error = _group_error(groups, candidate, group_size)
            best = tl.where(error < least, candidate, best)
            least = tl.minimum(error, least)
    return best


@triton.jit
def quantize_int4_group(
    source,
    block_scale,
    factors,
    packed,
    scale,
    signal,
    error,
    max_error,
    n,
    k,
    factor_count: tl.constexpr,
    group_size: tl.constexpr,
    ROWS: tl.constexpr,
):
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    lanes = tl.zeros((ROWS, LANES), tl.float64)
    errors = tl.zeros((ROWS, LANES), tl.float64)
    largest = tl.zeros((ROWS, LANES), tl.uint32)
    per_step: tl.constexpr = LANES // group_size
    for start in range(0, k, LANES):
        weights = _load(source, block_scale, rows, start + tl.arange(0, LANES), n, k)
        groups = tl.reshape(weights, (ROWS * per_step, group_size))
        multiplier = _int4_scale(groups, factors, factor_count, group_size)
        rounder = _int4_rounder(groups, multiplier)
        index = start // group_size + tl.arange(0, per_step)
        tl.store(
            scale + rows[:, None] * (k // group_size) + index[None, :],
            tl.reshape(multiplier, (ROWS, per_step)),
            mask=(rows < n)[:, None] & (index < k // group_size)[None, :],
        )
        nibbles = (_bits(rounder) + 8) & 15
        low, high = tl.split(tl.reshape(nibbles, (ROWS, LANES // 2, 2)))
        index = start // 2 + tl.arange(0, LANES // 2)
        tl.store(
            packed + rows[:, None] * (k // 2) + index[None, :],
            (low | (high << 4)).to(tl.uint8),
            mask=(rows < n)[:, None] & (index < k // 2)[None, :],
        )
        kept = (rounder - ROUNDER) * multiplier[:, None]
        difference = weights - tl.reshape(kept, (ROWS, LANES))
        lanes = _add_squares(lanes, weights)
        errors = _add_squares(errors, difference)
        largest = tl.maximum(largest, _bits(difference) & MAGNITUDE).to(tl.uint32)
    _store_stats(lanes, errors, largest, signal, error, max_error, rows, n)


@triton.jit
def dequantize_int8_channel(codes, scale, out, n, k, ROWS: tl.constexpr):
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    multiplier = tl.load(scale + rows, mask=rows < n, other=1.0)
    for start in range(0, k, LANES):
        columns = start + tl.arange(0, LANES)
        inside = (rows < n)[:, None] & (columns < k)[None, :]
        stored = tl.load(codes + rows[:, None] * k + columns[None, :], mask=inside, other=0)
        values = (stored.to(tl.int32) - 128).to(tl.float32)
        _store(values * multiplier[:, None], out, rows, columns, n, k)


@triton.jit
def dequantize_int4_group(pairs, scale, out, n, k, group_size, ROWS: tl.constexpr):
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    for start in range(0, k, LANES):
        columns = start + tl.arange(0, LANES)
        inside = (rows < n)[:, None] & (columns < k)[None, :]
        address = pairs + rows[:, None] * (k // 2) + (columns // 2)[None, :]
        stored = tl.load(address, mask=inside, other=0).to(tl.int32)
        values = ((stored >> (columns % 2 * 4)[None, :]) & 15) - 8
        groups = rows[:, None] * (k // group_size) + (columns // group_size)[None, :]
        multiplier = tl.load(scale + groups, mask=inside, other=1.0)
        _store(values.to(tl.float32) * multiplier, out, rows, columns, n, k)
