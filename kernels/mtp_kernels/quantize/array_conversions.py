"""Conversions of rows in main memory from format to format, without torch, which takes 200 MB and
two seconds to import.

Each returns None for rows that are out of the ordinary, such as damaged ones: the functions on
tensors know what is wrong with them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from mtp_kernels.quantize import cpu_arrays
from mtp_kernels.quantize.layouts import (
    SCALE_FACTORS,
    SIGN_BITS,
    W4AFP8_GROUP,
    ErrorStats,
)


class Rows(NamedTuple):
    """Rows of a weight: the bits of fp8 codes, with the fp32 scales of their blocks, or those of
    bf16 or fp32 values."""

    values: Any
    block_scale: Any = cpu_arrays.NO_BLOCK_SCALE


class Converted(NamedTuple):
    """Arrays of codes and scales, or of values, with the error that was made."""

    outputs: tuple[Any, ...]
    error: ErrorStats


def to_bf16(rows: Rows) -> Converted | None:
    """Dequantize fp8 blocks."""
    weights, stats = cpu_arrays.dequantize_fp8_block(*rows, np.uint16)
    return _converted(rows, stats, weights)


def to_fp8_block(rows: Rows) -> Converted | None:
    """Quantize values as quantize_fp8_block."""
    codes, scale, stats = cpu_arrays.quantize_fp8_block(rows.values, False)
    return _converted(rows, stats, codes, scale)


def to_int8_channel(rows: Rows) -> Converted | None:
    """Quantize as quantize_int8_channel."""
    packed, scale, stats = cpu_arrays.quantize_int8_channel(*rows)
    return _converted(rows, stats, packed, _bf16(scale))


def to_int4_group(rows: Rows, group_size: int, scale_rule: str) -> Converted | None:
    """Quantize as quantize_int4_group."""
    factors = SCALE_FACTORS[scale_rule]
    packed, scale, stats = cpu_arrays.quantize_int4_group(*rows, group_size, factors)
    return _converted(rows, stats, packed, _bf16(scale))


def to_w4afp8(rows: Rows, scale_rule: str) -> Converted | None:
    """Quantize as quantize_w4afp8."""
    factors = SCALE_FACTORS[scale_rule]
    packed, scale, stats = cpu_arrays.quantize_int4_group(*rows, W4AFP8_GROUP, factors)
    return _converted(rows, stats, packed ^ np.uint8(SIGN_BITS & 0xFF), scale)


def _bf16(scale: Any) -> Any:
    """Return the bits of scales that are bf16 values already."""
    return (scale.view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def _converted(rows: Rows, stats: cpu_arrays.Stats, *outputs: Any) -> Converted | None:
    scale = rows.block_scale
    plain = (np.isfinite(stats.signal), np.isfinite(stats.error), np.isfinite(scale) & (scale > 0))
    if not all(one.all() for one in plain):
        return None
    error = ErrorStats.of_rows(
        rows.values.size,
        signal=stats.signal.tolist(),
        error=stats.error.tolist(),
        max_error=float(stats.max_error.max()),
    )
    return Converted(outputs, error)
