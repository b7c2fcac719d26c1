"""CUDA backend in Triton: a few rows per program, one pass over the stored bytes."""

from __future__ import annotations

from typing import Any

import torch
import triton

from mtp_kernels.gpu.devices import launches_on
from mtp_kernels.quantize import triton_rows
from mtp_kernels.quantize.layouts import BLOCK, RowStats

ROWS = 4  # of one program
# Contraction would skip the rounding of code * block scale: the bits would differ.
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}

# The kernels load bits; the dtype of the bits says how to read a source.
_BITS = {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8}


def supports(device: torch.device) -> bool:
    """Return True for CUDA tensors, and for others under Triton's interpreter."""
    return device.type == ("cpu" if triton.knobs.runtime.interpret else "cuda")


def dequantize_fp8_block(
    codes: torch.Tensor, block_scale: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, RowStats]:
    rows, columns = codes.shape
    weights = torch.empty(rows, columns, dtype=dtype, device=codes.device)
    stats = _row_stats(codes)
    kernel = triton_rows.dequantize_fp8_block
    _by_rows(kernel, codes, block_scale, _bits(weights), *stats, rows, columns)
    return weights, stats


def quantize_fp8_block(
    source: torch.Tensor, power_of_two: bool
) -> tuple[torch.Tensor, torch.Tensor, RowStats]:
    rows, columns = source.shape
    codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=source.device)
    grid = (triton.cdiv(rows, BLOCK), triton.cdiv(columns, BLOCK))
    scale = torch.empty(grid, device=source.device)
    stats = _row_stats(source)
    with launches_on(source.device):
        triton_rows.block_scales[grid](_bits(source), scale, rows, columns, power_of_two, **OPTIONS)
    kernel = triton_rows.quantize_fp8_block
    _by_rows(kernel, source, scale, _bits(codes), *stats, rows, columns)
    return codes, scale, stats


def quantize_int8_channel(
    source: torch.Tensor, block_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, RowStats]:
    rows, columns = source.shape
    codes = torch.empty(rows, columns, dtype=torch.uint8, device=source.device)
    scale = torch.empty(rows, 1, device=source.device)
    stats = _row_stats(source)
    _by_rows(
        triton_rows.quantize_int8_channel,
        source,
        scale if block_scale is None else block_scale,
        codes,
        scale,
        *stats,
        rows,
        columns,
    )
    return codes, scale, stats


def quantize_int4_group(
    source: torch.Tensor,
    block_scale: torch.Tensor | None,
    group_size: int,
    factors: tuple[float, ...],
) -> tuple[torch.Tensor, torch.Tensor, RowStats]:
    rows, columns = source.shape
    pairs = torch.empty(rows, columns // 2, dtype=torch.uint8, device=source.device)
    scale = torch.empty(rows, columns // group_size, device=source.device)
    stats = _row_stats(source)
    _by_rows(
        triton_rows.quantize_int4_group,
        source,
        scale if block_scale is None else block_scale,
        torch.tensor(factors, device=source.device),
        pairs,
        scale,
        *stats,
        rows,
        columns,
        len(factors),
        group_size,
    )
    return pairs, scale, stats


def dequantize_int8_channel(
    codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    weights = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    kernel = triton_rows.dequantize_int8_channel
    _by_rows(kernel, codes, scale, _bits(weights), *codes.shape)
    return weights


def dequantize_int4_group(
    pairs: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    rows, columns = pairs.shape[0], 2 * pairs.shape[1]
    weights = torch.empty(rows, columns, dtype=dtype, device=pairs.device)
    kernel = triton_rows.dequantize_int4_group
    _by_rows(kernel, pairs, scale, _bits(weights), rows, columns, columns // scale.shape[1])
    return weights


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(_BITS.get(tensor.dtype, tensor.dtype))


def _by_rows(kernel: Any, source: torch.Tensor, *others: object) -> None:
    """Launch a kernel that goes over the rows of its first argument."""
    grid = (triton.cdiv(source.shape[0], ROWS),)
    with launches_on(source.device):
        kernel[grid](_bits(source), *others, ROWS, **OPTIONS)


def _row_stats(source: torch.Tensor) -> RowStats:
    rows, device = source.shape[0], source.device
    energies = torch.empty(2, rows, dtype=torch.float64, device=device)
    return RowStats(energies[0], energies[1], torch.empty(rows, device=device))
