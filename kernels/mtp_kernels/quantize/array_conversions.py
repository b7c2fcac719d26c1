"""Conversions of rows in main memory, without torch, which takes 200 MB and two seconds to import.

One compiled pass over rows that stay in cache, without the GIL. numpy has neither bf16 nor fp8:
arrays hold their bits, as uint16 and uint8, and the dtype of the bits says how to read a source;
those of half precision, which are only written, are int16. A call uses one thread; callers run
several at once. The bits do not depend on that.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from mtp_kernels.quantize import cpu_block_floats, cpu_rows
from mtp_kernels.quantize.block_floats import MX_GROUP, NVFP4_GROUP
from mtp_kernels.quantize.ggml_blocks import GGML_BLOCKS, quantize_ggml_blocks
from mtp_kernels.quantize.layouts import (
    BLOCK,
    SCALE_FACTORS,
    SIGN_BITS,
    W4AFP8_GROUP,
    ErrorStats,
)

NO_BLOCK_SCALE = np.empty((0, 0), np.float32)


class Stats(NamedTuple):
    """RowStats as arrays."""

    signal: Any
    error: Any
    max_error: Any


def dequantize_fp8_block(codes: Any, block_scale: Any, dtype: Any) -> tuple[Any, Stats]:
    """Return weights [N, K] in the dtype of their bits."""
    weights = np.empty(codes.shape, dtype)
    stats = _stats(codes)
    cpu_rows.dequantize_fp8_block(codes, block_scale, weights, *stats)
    return weights, stats


def quantize_fp8_block(source: Any, power_of_two: bool) -> tuple[Any, Any, Stats]:
    """Return codes [N, K] and scales [⌈N/128⌉, ⌈K/128⌉]."""
    rows, columns = source.shape
    codes = np.empty((rows, columns), np.uint8)
    scale = np.empty((-(-rows // BLOCK), -(-columns // BLOCK)), np.float32)
    stats = _stats(source)
    cpu_rows.quantize_fp8_block(source, NO_BLOCK_SCALE, power_of_two, codes, scale, *stats)
    return codes, scale, stats


def quantize_int8_channel(source: Any, block_scale: Any) -> tuple[Any, Any, Stats]:
    """Return code + 128 [N, K] and scales [N, 1]."""
    rows, columns = source.shape
    packed = np.empty((rows, columns), np.uint8)
    scale = np.empty((rows, 1), np.float32)
    stats = _stats(source)
    cpu_rows.quantize_int8_channel(source, block_scale, packed, scale, *stats)
    return packed, scale, stats


def quantize_int4_group(
    source: Any, block_scale: Any, group_size: int, factors: tuple[float, ...]
) -> tuple[Any, Any, Stats]:
    """Return pairs of code + 8 [N, K/2] and scales [N, K/group_size]."""
    rows, columns = source.shape
    packed = np.empty((rows, columns // 2), np.uint8)
    scale = np.empty((rows, columns // group_size), np.float32)
    stats = _stats(source)
    cpu_rows.quantize_int4_group(
        source, block_scale, group_size, np.array(factors, np.float32), packed, scale, *stats
    )
    return packed, scale, stats


def dequantize_int8_channel(codes: Any, scale: Any, dtype: Any) -> Any:
    """Return weights [N, K] in the dtype of their bits."""
    weights = np.empty(codes.shape, dtype)
    cpu_rows.dequantize_int8_channel(codes, scale, weights)
    return weights


def dequantize_int4_group(pairs: Any, scale: Any, dtype: Any) -> Any:
    """Return weights [N, K] in the dtype of their bits."""
    weights = np.empty((pairs.shape[0], 2 * pairs.shape[1]), dtype)
    cpu_rows.dequantize_int4_group(pairs, scale, weights)
    return weights


def quantize_nvfp4(
    source: Any, block_scale: Any, divisor: float, sweep: bool
) -> tuple[Any, Any, Stats]:
    """Return pairs of e2m1 codes [N, K/2] and the bits of e4m3 scales [N, K/16]."""
    rows, columns = source.shape
    packed = np.empty((rows, columns // 2), np.uint8)
    scale = np.empty((rows, columns // NVFP4_GROUP), np.uint8)
    stats, given = _stats(source), (source, block_scale, np.float32(divisor))
    if sweep:
        cpu_block_floats.nvfp4_swept_scales(*given, scale)
    cpu_block_floats.quantize_nvfp4(*given, sweep, scale, packed, *stats)
    return packed, scale, stats


def quantize_mxfp4(source: Any, block_scale: Any, sweep: bool) -> tuple[Any, Any, Stats]:
    """Return pairs of e2m1 codes [N, K/2] and e8m0 scales [N, K/32]."""
    rows, columns = source.shape
    packed = np.empty((rows, columns // 2), np.uint8)
    scale = np.empty((rows, columns // MX_GROUP), np.uint8)
    stats = _stats(source)
    cpu_block_floats.quantize_mxfp4(source, block_scale, sweep, packed, scale, *stats)
    return packed, scale, stats


def quantize_mxfp8(source: Any, block_scale: Any, sweep: bool) -> tuple[Any, Any, Stats]:
    """Return the bits of e4m3 codes [N, K] and e8m0 scales [N, K/32]."""
    rows, columns = source.shape
    codes = np.empty((rows, columns), np.uint8)
    scale = np.empty((rows, columns // MX_GROUP), np.uint8)
    stats = _stats(source)
    cpu_block_floats.quantize_mxfp8(source, block_scale, sweep, codes, scale, *stats)
    return codes, scale, stats


def _stats(source: Any) -> Stats:
    rows = source.shape[0]
    return Stats(np.empty(rows), np.empty(rows), np.empty(rows, np.float32))


class Rows(NamedTuple):
    """Rows of a weight: the bits of fp8 codes, with the fp32 scales of their blocks, or those of
    bf16 or fp32 values."""

    values: Any
    block_scale: Any = NO_BLOCK_SCALE


def rows_of(values: Any, block_scale: Any = NO_BLOCK_SCALE) -> Rows:
    """Return rows of a source; values in half precision as fp32, which holds them exactly."""
    return Rows(values.astype(np.float32) if values.dtype == np.float16 else values, block_scale)


class Converted(NamedTuple):
    """Arrays of codes and scales, or of values, with the error that was made.

    The conversions return None for rows that are out of the ordinary, such as damaged ones: the
    functions on tensors know what is wrong with them.
    """

    outputs: tuple[Any, ...]
    error: ErrorStats


def to_bf16(rows: Rows) -> Converted | None:
    """Dequantize fp8 blocks."""
    weights, stats = dequantize_fp8_block(*rows, np.uint16)
    return _converted(rows, stats, weights)


def to_f16(rows: Rows) -> Converted | None:
    """Round values, or those of fp8 blocks, to half precision."""
    weights, stats = dequantize_fp8_block(*rows, np.int16)
    return _converted(rows, stats, weights)


def to_fp8_block(rows: Rows) -> Converted | None:
    """Quantize values as quantize_fp8_block."""
    codes, scale, stats = quantize_fp8_block(rows.values, False)
    return _converted(rows, stats, codes, scale)


def to_int8_channel(rows: Rows) -> Converted | None:
    """Quantize as quantize_int8_channel."""
    packed, scale, stats = quantize_int8_channel(*rows)
    return _converted(rows, stats, packed, _bf16(scale))


def to_int4_group(rows: Rows, group_size: int, scale_rule: str) -> Converted | None:
    """Quantize as quantize_int4_group."""
    factors = SCALE_FACTORS[scale_rule]
    packed, scale, stats = quantize_int4_group(*rows, group_size, factors)
    return _converted(rows, stats, packed, _bf16(scale))


def to_w4afp8(rows: Rows, scale_rule: str) -> Converted | None:
    """Quantize as quantize_w4afp8."""
    factors = SCALE_FACTORS[scale_rule]
    packed, scale, stats = quantize_int4_group(*rows, W4AFP8_GROUP, factors)
    return _converted(rows, stats, packed ^ np.uint8(SIGN_BITS & 0xFF), scale)


def to_ggml_blocks(kind: str, rows: Rows) -> Converted | None:
    """Quantize into ggml's blocks of a kind."""
    packed, stats = quantize_ggml_blocks(kind, *rows)
    return _converted(rows, Stats(*stats), packed)


def to_nvfp4(rows: Rows, divisor: float, sweep: bool) -> Converted | None:
    """Quantize as block_floats.quantize_nvfp4."""
    packed, scale, stats = quantize_nvfp4(*rows, divisor, sweep)
    return _converted(rows, stats, packed, scale)


def to_mxfp4(rows: Rows, sweep: bool) -> Converted | None:
    """Quantize as block_floats.quantize_mxfp4."""
    packed, scale, stats = quantize_mxfp4(*rows, sweep)
    return _converted(rows, stats, packed, scale)


def to_mxfp8(rows: Rows, sweep: bool) -> Converted | None:
    """Quantize as block_floats.quantize_mxfp8."""
    codes, scale, stats = quantize_mxfp8(*rows, sweep)
    return _converted(rows, stats, codes, scale)


def largest_magnitude(rows: Rows) -> float:
    """Return the largest magnitude of rows; NaN or infinity for damaged ones."""
    maxima = np.empty(rows.values.shape[0], np.float32)
    cpu_block_floats.row_maxima(*rows, maxima)
    return float(maxima.max())


def _bf16(scale: Any) -> Any:
    """Return the bits of scales that are bf16 values already."""
    return (scale.view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def _converted(rows: Rows, stats: Stats, *outputs: Any) -> Converted | None:
    scale = rows.block_scale
    plain = (np.isfinite(stats.signal), np.isfinite(stats.error), np.isfinite(scale) & (scale > 0))
    if not all(check.all() for check in plain):
        return None
    error = ErrorStats.of_rows(
        rows.values.size,
        signal=stats.signal.tolist(),
        error=stats.error.tolist(),
        max_error=float(stats.max_error.max()),
    )
    return Converted(outputs, error)


# By the name of the format that is made.
CONVERSIONS: dict[str, Callable[..., Converted | None]] = {
    "bf16": to_bf16,
    "f16": to_f16,
    "fp8_block": to_fp8_block,
    "int8_channel": to_int8_channel,
    "int4_group": to_int4_group,
    "w4afp8": to_w4afp8,
    "mxfp4_packed": to_mxfp4,
    "mxfp8": to_mxfp8,
    **dict.fromkeys(("nvfp4_packed", "nvfp4_packed_a4", "nvfp4", "nvfp4_a16"), to_nvfp4),
    **{kind: partial(to_ggml_blocks, kind) for kind in GGML_BLOCKS},
}
