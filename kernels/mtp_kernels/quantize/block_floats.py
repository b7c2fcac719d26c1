"""Blocks of small floats under a scale each, in torch: it defines the correct bits.

e2m1 numbers are 0, 0.5, 1, 1.5, 2, 3, 4 and 6 with a sign; two lie in a byte, the even column's in
the lower bits. nvfp4 has a scale e4m3 for 16 of them, and one number for the whole matrix.
Sources: compressed-tensors `compressors/nvfp4`, `quantization/utils`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from mtp_kernels.quantize.layouts import E4M3_MAX, RowStats

if TYPE_CHECKING:
    import torch

NVFP4_GROUP = 16  # columns per scale
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX = 6.0
NVFP4_RANGE = E4M3_MAX * E2M1_MAX  # the largest number under the largest scale
E4M3_CODES = range(1, 127)  # of the numbers above 0
UNDERFLOW = 0x20  # e4m3 code that stands for a scale that rounds to 0; compressed-tensors' 2**-3
_SIGN = 8  # of an e2m1 code


def nvfp4_divisor(amax: float) -> float:
    """Return the number, in float32, that the scales of matrices up to amax are multiplied by
    before they are rounded; 1 for amax 0."""
    least = np.finfo(np.float32).tiny
    with np.errstate(over="ignore"):  # rounded twice, as compressed-tensors does it
        divisor = np.float32(1) / np.maximum(np.float32(amax), least) * np.float32(NVFP4_RANGE)
    return float(divisor) if math.isfinite(divisor) else 1.0


def quantize_nvfp4(
    weights: torch.Tensor, divisor: float, *, sweep: bool
) -> tuple[torch.Tensor, torch.Tensor, RowStats]:
    """Return codes U8 [n, K/2], scales F8_E4M3 [n, K/16] and the error of fp32 rows [n, K].

    The scale of a group is its amax / 6 times the divisor, rounded; with sweep that one of all
    e4m3 numbers above 0 under which the squared error is least, the smallest of several.
    """
    import torch

    from mtp_kernels.quantize.reference import row_stats

    groups = weights.reshape(len(weights), -1, NVFP4_GROUP)  # [n, K/16, 16]
    scale = _swept_scale(groups, divisor) if sweep else _amax_scale(groups, divisor)
    multiplier = _over(scale.float(), divisor)[..., None]
    codes = e2m1_codes(groups / multiplier)
    kept = e2m1_values(codes) * multiplier
    packed = pack_pairs(codes.flatten(1))
    return packed, scale, row_stats(weights, kept.flatten(1).to(torch.float32))


def dequantize_nvfp4(codes: torch.Tensor, multiplier: torch.Tensor) -> torch.Tensor:
    """Return fp32 weights [n, K] of codes [n, K/2] and fp32 multipliers [n, K/16]."""
    values = e2m1_values(unpack_pairs(codes))
    return values * multiplier.repeat_interleave(NVFP4_GROUP, dim=1)


def e2m1_codes(values: torch.Tensor) -> torch.Tensor:
    """Return the codes U8 of fp32 numbers, rounded to nearest even and saturated at 6."""
    import torch

    magnitude = values.abs().clamp(max=E2M1_MAX)
    below_2, below_4 = torch.round(2 * magnitude), torch.round(magnitude) + 2
    upper = torch.where(magnitude < 4, below_4, torch.round(magnitude / 2) + 4)
    codes = torch.where(magnitude < 2, below_2, upper).to(torch.uint8)
    return codes | (values < 0).to(torch.uint8) * _SIGN


def e2m1_values(codes: torch.Tensor) -> torch.Tensor:
    """Return the fp32 numbers of codes U8."""
    import torch

    table = torch.tensor([*E2M1, *(-value for value in E2M1)], device=codes.device)
    return table[codes.long()]


def pack_pairs(codes: torch.Tensor) -> torch.Tensor:
    """Return codes of 4 bits [n, K] as bytes [n, K/2]."""
    return codes[:, ::2] | codes[:, 1::2] << 4


def unpack_pairs(packed: torch.Tensor) -> torch.Tensor:
    """Return bytes [n, K/2] as codes of 4 bits [n, K]."""
    import torch

    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(1)


def _over(numerator: torch.Tensor, divisor: float) -> torch.Tensor:
    """Divide by a number: CUDA would multiply by its inverse."""
    return numerator / numerator.new_tensor(divisor)


def _amax_scale(groups: torch.Tensor, divisor: float) -> torch.Tensor:
    import torch

    ideal = _over(groups.abs().amax(dim=2), E2M1_MAX) * divisor
    scale = ideal.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(scale == 0, UNDERFLOW, scale).to(torch.uint8).view(torch.float8_e4m3fn)


def _swept_scale(groups: torch.Tensor, divisor: float) -> torch.Tensor:
    import torch

    best = torch.full(groups.shape[:2], E4M3_CODES.start, dtype=torch.uint8, device=groups.device)
    least = torch.full(groups.shape[:2], math.inf, dtype=torch.float64, device=groups.device)
    for code in E4M3_CODES:
        scale = torch.tensor([code], dtype=torch.uint8, device=groups.device)
        multiplier = _over(scale.view(torch.float8_e4m3fn).float(), divisor)
        error = _group_error(groups, multiplier)
        best = torch.where(error < least, scale, best)
        least = torch.minimum(error, least)
    return best.view(torch.float8_e4m3fn)


def _group_error(groups: torch.Tensor, multiplier: torch.Tensor) -> torch.Tensor:
    import torch

    from mtp_kernels.quantize.reference import halve

    kept = e2m1_values(e2m1_codes(groups / multiplier)) * multiplier
    return halve((groups - kept).to(torch.float64).square())
