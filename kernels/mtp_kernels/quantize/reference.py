"""Reference backend in torch, slow and plain: it defines the correct bits."""

from __future__ import annotations

import torch

from mtp_kernels.quantize.layouts import (
    BLOCK,
    E4M3_MAX,
    INT4_HALF_RANGE,
    INT4_MAX,
    INT4_MIN,
    INT8_MAX,
    LANES,
    SCALE_FLOOR,
    ZERO_SCALE,
    RowStats,
)


def supports(device: torch.device) -> bool:
    """Return True for every device that torch computes on."""
    return device.type != "meta"


def dequantize_fp8_block(
    codes: torch.Tensor, block_scale: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, RowStats]:
    weights = stored_weights(codes, block_scale)
    rounded = weights.to(dtype)
    return rounded, row_stats(weights, rounded.to(torch.float32))


def quantize_fp8_block(
    source: torch.Tensor, power_of_two: bool
) -> tuple[torch.Tensor, torch.Tensor, RowStats]:
    weights = stored_weights(source, None)
    rows, columns = weights.shape
    padded = _pad(_pad(weights, BLOCK).T, BLOCK).T  # [⌈N⌉, ⌈K⌉]
    blocks = padded.reshape(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    scale = _scale(blocks.abs().amax(dim=(1, 3)), E4M3_MAX)
    if power_of_two:
        mantissa, exponent = torch.frexp(scale)  # scale = mantissa * 2**exponent, 0.5 <= mantissa
        scale = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())
    each = _expand(scale, rows, columns)
    codes = (weights / each).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes, scale, row_stats(weights, codes.to(torch.float32) * each)


def quantize_int8_channel(
    source: torch.Tensor, block_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, RowStats]:
    weights = stored_weights(source, block_scale)
    scale = _round_to_bf16(_scale(weights.abs().amax(dim=1, keepdim=True), INT8_MAX))
    codes = torch.round(weights / scale)
    return (codes + 128).to(torch.uint8), scale, row_stats(weights, codes * scale)


def quantize_int4_group(
    source: torch.Tensor,
    block_scale: torch.Tensor | None,
    group_size: int,
    factors: tuple[float, ...],
) -> tuple[torch.Tensor, torch.Tensor, RowStats]:
    weights = stored_weights(source, block_scale)
    groups = weights.reshape(len(weights), -1, group_size)  # [N, K/g, g]
    amax = groups.abs().amax(dim=2)
    scale = _round_to_bf16(_scale(amax, INT4_HALF_RANGE, factors[0]))
    least = _group_error(groups, scale)
    for factor in factors[1:]:
        candidate = _round_to_bf16(_scale(amax, INT4_HALF_RANGE, factor))
        error = _group_error(groups, candidate)
        scale = torch.where(error < least, candidate, scale)
        least = torch.minimum(error, least)
    codes = _int4_codes(groups, scale)
    pairs = (codes.flatten(1) + 8).to(torch.uint8).reshape(len(weights), -1, 2)
    packed = pairs[..., 0] | pairs[..., 1] << 4
    return packed, scale, row_stats(weights, (codes * scale[..., None]).flatten(1))


def dequantize_int8_channel(
    codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    return ((codes.to(torch.float32) - 128) * scale).to(dtype)


def dequantize_int4_group(
    pairs: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    codes = torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(1).to(torch.float32) - 8
    groups = codes.reshape(*scale.shape, -1)
    return (groups * scale[..., None]).flatten(1).to(dtype)


def stored_weights(source: torch.Tensor, block_scale: torch.Tensor | None) -> torch.Tensor:
    """Return a source's fp32 weights: its values, or fp8 codes times their block's scale."""
    weights = source.to(torch.float32)
    if block_scale is None:
        return weights
    return weights * _expand(block_scale, *weights.shape)


def row_stats(weights: torch.Tensor, restored: torch.Tensor) -> RowStats:
    """Return energies of weights and of fp32 `weights - restored`, in the order of RowStats."""
    error = weights - restored
    return RowStats(_row_energy(weights), _row_energy(error), error.abs().amax(dim=1))


def _row_energy(values: torch.Tensor) -> torch.Tensor:
    segments = _pad(values, LANES).to(torch.float64).square().reshape(len(values), -1, LANES)
    lanes = torch.zeros_like(segments[:, 0])
    for segment in range(segments.shape[1]):
        lanes = lanes + segments[:, segment]
    return halve(lanes)


def halve(lanes: torch.Tensor) -> torch.Tensor:
    """Return the sums over the last dimension, a power of two, in the order of RowStats."""
    while lanes.shape[-1] > 1:
        lower, upper = lanes.chunk(2, dim=-1)
        lanes = lower + upper
    return lanes[..., 0]


def _group_error(groups: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    error = groups - _int4_codes(groups, scale) * scale[..., None]
    return halve(error.to(torch.float64).square())


def _int4_codes(groups: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch.round((groups / scale[..., None]).clamp(INT4_MIN, INT4_MAX))


def _scale(amax: torch.Tensor, divisor: float, factor: float = 1.0) -> torch.Tensor:
    """amax / divisor * factor, neither zero nor subnormal; 1 where there is nothing to scale."""
    # Divided by a tensor on amax's device: CUDA multiplies by the inverse of a Python number.
    ideal = amax / torch.tensor(divisor, device=amax.device) * factor
    return torch.where(amax == 0, ZERO_SCALE, ideal.clamp(min=SCALE_FLOOR))


def _round_to_bf16(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.bfloat16).to(torch.float32)


def _expand(scale: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    wide = scale.repeat_interleave(BLOCK, dim=0).repeat_interleave(BLOCK, dim=1)
    return wide[:rows, :columns]


def _pad(values: torch.Tensor, multiple: int) -> torch.Tensor:
    return torch.nn.functional.pad(values, (0, -values.shape[1] % multiple))
