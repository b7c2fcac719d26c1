"""Arrays as the CPU backend computes them: one compiled pass over rows that stay in cache, without
the GIL and without torch.

numpy has neither bf16 nor fp8: arrays hold their bits, as uint16 and uint8, and the dtype of the
bits says how to read a source. A call uses one thread; callers run several at once. The bits do not
depend on that.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from mtp_kernels.quantize import cpu_rows
from mtp_kernels.quantize.layouts import BLOCK

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


def _stats(source: Any) -> Stats:
    rows = source.shape[0]
    return Stats(np.empty(rows), np.empty(rows), np.empty(rows, np.float32))
