"""Fused CPU backend: cpu_arrays on the memory of tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mtp_kernels.quantize import cpu_arrays
from mtp_kernels.quantize.layouts import RowStats

_BITS = {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8}
_ARRAY_DTYPES = {torch.bfloat16: np.uint16, torch.float32: np.float32}


def supports(device: torch.device) -> bool:
    """Return True for tensors in main memory."""
    return device.type == "cpu"


def dequantize_fp8_block(
    codes: torch.Tensor, block_scale: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, RowStats]:
    weights, stats = cpu_arrays.dequantize_fp8_block(
        _array(codes), _array(block_scale), _ARRAY_DTYPES[dtype]
    )
    return _tensor(weights).view(dtype), _row_stats(stats)


def quantize_fp8_block(
    source: torch.Tensor, power_of_two: bool
) -> tuple[torch.Tensor, torch.Tensor, RowStats]:
    codes, scale, stats = cpu_arrays.quantize_fp8_block(_array(source), power_of_two)
    return _tensor(codes).view(torch.float8_e4m3fn), _tensor(scale), _row_stats(stats)


def quantize_int8_channel(
    source: torch.Tensor, block_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, RowStats]:
    packed, scale, stats = cpu_arrays.quantize_int8_channel(*_source_arrays(source, block_scale))
    return _tensor(packed).view(torch.int32), _tensor(scale), _row_stats(stats)


def quantize_int4_group(
    source: torch.Tensor,
    block_scale: torch.Tensor | None,
    group_size: int,
    factors: tuple[float, ...],
) -> tuple[torch.Tensor, torch.Tensor, RowStats]:
    arrays = _source_arrays(source, block_scale)
    packed, scale, stats = cpu_arrays.quantize_int4_group(*arrays, group_size, factors)
    return _tensor(packed).view(torch.int32), _tensor(scale), _row_stats(stats)


def dequantize_int8_channel(
    packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    codes = _array(packed.view(torch.uint8))
    weights = cpu_arrays.dequantize_int8_channel(codes, _array(scale), _ARRAY_DTYPES[dtype])
    return _tensor(weights).view(dtype)


def dequantize_int4_group(
    packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    pairs = _array(packed.view(torch.uint8))
    weights = cpu_arrays.dequantize_int4_group(pairs, _array(scale), _ARRAY_DTYPES[dtype])
    return _tensor(weights).view(dtype)


def _array(tensor: torch.Tensor) -> Any:
    return tensor.view(_BITS.get(tensor.dtype, tensor.dtype)).numpy()


def _source_arrays(source: torch.Tensor, block_scale: torch.Tensor | None) -> tuple[Any, Any]:
    return _array(source), cpu_arrays.NO_BLOCK_SCALE if block_scale is None else _array(block_scale)


def _tensor(array: Any) -> torch.Tensor:
    return torch.from_numpy(array)


def _row_stats(stats: cpu_arrays.Stats) -> RowStats:
    return RowStats(*map(_tensor, stats))
