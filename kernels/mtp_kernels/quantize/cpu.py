"""Fused CPU backend: one compiled pass over rows that stay in cache, without the GIL.

A call uses one thread; callers run several tensors at once. The bits do not depend on that.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mtp_kernels.quantize import cpu_rows
from mtp_kernels.quantize.layouts import BLOCK, RowStats

# numpy has neither bf16 nor fp8: the compiled loops see their bits, and the dtype of the bits
# says how to read a source.
_BITS = {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8}
_NO_BLOCK_SCALE = torch.empty(0, 0)


def supports(device: torch.device) -> bool:
    """Return True for tensors in main memory."""
    return device.type == "cpu"


def dequantize_fp8_block(
    codes: torch.Tensor, block_scale: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, RowStats]:
    weights = torch.empty(codes.shape, dtype=dtype)
    stats = _row_stats(codes)
    cpu_rows.dequantize_fp8_block(_array(codes), _array(block_scale), _array(weights), *stats)
    return weights, _tensors(stats)


def quantize_fp8_block(
    source: torch.Tensor, power_of_two: bool
) -> tuple[torch.Tensor, torch.Tensor, RowStats]:
    rows, columns = source.shape
    codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    scale = torch.empty(-(-rows // BLOCK), -(-columns // BLOCK))
    stats = _row_stats(source)
    cpu_rows.quantize_fp8_block(
        _array(source), _array(_NO_BLOCK_SCALE), power_of_two, _array(codes), _array(scale), *stats
    )
    return codes, scale, _tensors(stats)


def quantize_int8_channel(
    source: torch.Tensor, block_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, RowStats]:
    rows, columns = source.shape
    packed = torch.empty(rows, columns, dtype=torch.uint8)
    scale = torch.empty(rows, 1)
    stats = _row_stats(source)
    cpu_rows.quantize_int8_channel(
        *_source_arrays(source, block_scale), _array(packed), _array(scale), *stats
    )
    return packed.view(torch.int32), scale, _tensors(stats)


def quantize_int4_group(
    source: torch.Tensor,
    block_scale: torch.Tensor | None,
    group_size: int,
    factors: tuple[float, ...],
) -> tuple[torch.Tensor, torch.Tensor, RowStats]:
    rows, columns = source.shape
    packed = torch.empty(rows, columns // 2, dtype=torch.uint8)
    scale = torch.empty(rows, columns // group_size)
    stats = _row_stats(source)
    cpu_rows.quantize_int4_group(
        *_source_arrays(source, block_scale),
        group_size,
        np.array(factors, np.float32),
        _array(packed),
        _array(scale),
        *stats,
    )
    return packed.view(torch.int32), scale, _tensors(stats)


def dequantize_int8_channel(
    packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    codes = packed.view(torch.uint8)
    weights = torch.empty(codes.shape, dtype=dtype)
    cpu_rows.dequantize_int8_channel(_array(codes), _array(scale), _array(weights))
    return weights


def dequantize_int4_group(
    packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    pairs = packed.view(torch.uint8)
    weights = torch.empty(pairs.shape[0], 2 * pairs.shape[1], dtype=dtype)
    cpu_rows.dequantize_int4_group(_array(pairs), _array(scale), _array(weights))
    return weights


def _array(tensor: torch.Tensor) -> Any:
    return tensor.view(_BITS.get(tensor.dtype, tensor.dtype)).numpy()


def _source_arrays(source: torch.Tensor, block_scale: torch.Tensor | None) -> tuple[Any, Any]:
    return _array(source), _array(_NO_BLOCK_SCALE if block_scale is None else block_scale)


def _row_stats(source: torch.Tensor) -> tuple[Any, Any, Any]:
    rows = source.shape[0]
    return np.empty(rows), np.empty(rows), np.empty(rows, np.float32)


def _tensors(stats: tuple[Any, Any, Any]) -> RowStats:
    return RowStats(*(torch.from_numpy(array) for array in stats))
