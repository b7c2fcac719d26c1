"""Blocks of small floats under a scale each, in torch: it defines the correct bits.

e2m1 numbers are 0, 0.5, 1, 1.5, 2, 3, 4 and 6 with a sign; two lie in a byte, the even column's in
the lower bits. nvfp4 has a scale e4m3 for 16 of them, and one number for the whole matrix. mxfp4
has a power of two, e8m0, for 32 of them, mxfp8 the same for 32 numbers e4m3.
Sources: compressed-tensors `compressors/nvfp4`, `quantization/utils`; OCP Microscaling Formats 1.0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
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
MX_GROUP = 32  # columns per power of two
E8M0_BIAS, E8M0_LAST = 127, 254  # of exponents; 255 is NaN
# Of the largest number: its mantissa, from 0.5 to 1, and exponent.
E2M1_TOP, E4M3_TOP = math.frexp(E2M1_MAX), math.frexp(E4M3_MAX)
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
    groups = weights.reshape(len(weights), -1, NVFP4_GROUP)  # [n, K/16, 16]
    scale = _swept_scale(groups, divisor) if sweep else _amax_scale(groups, divisor)
    multiplier = _over(scale.float(), divisor)[..., None]
    codes = e2m1_codes(groups / multiplier)
    kept = e2m1_values(codes) * multiplier
    return pack_pairs(codes.flatten(1)), scale, _row_stats(weights, kept)


def dequantize_e2m1(codes: torch.Tensor, multiplier: torch.Tensor) -> torch.Tensor:
    """Return fp32 weights [n, K] of codes [n, K/2] and the fp32 multipliers of groups."""
    values = e2m1_values(unpack_pairs(codes))
    return values * multiplier.repeat_interleave(values.shape[1] // multiplier.shape[1], dim=1)


def quantize_mxfp4(
    weights: torch.Tensor, *, sweep: bool
) -> tuple[torch.Tensor, torch.Tensor, RowStats]:
    """Return codes U8 [n, K/2], scales e8m0 U8 [n, K/32] and the error of fp32 rows [n, K].

    The scale of a group is the least power of two under which its amax is no larger than 6; with
    sweep half of that where the squared error is smaller. A group of zeros has scale 1.
    """
    numbers, scale, kept = _powers(weights, E2M1_TOP, _as_e2m1, sweep=sweep)
    return pack_pairs(e2m1_codes(numbers)), scale, _row_stats(weights, kept)


def quantize_mxfp8(
    weights: torch.Tensor, *, sweep: bool
) -> tuple[torch.Tensor, torch.Tensor, RowStats]:
    """Return codes F8_E4M3 [n, K], scales e8m0 U8 [n, K/32] and the error of fp32 rows [n, K]; the
    scales as of mxfp4, for the largest number 448."""
    import torch

    numbers, scale, kept = _powers(weights, E4M3_TOP, _as_e4m3, sweep=sweep)
    codes = numbers.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes, scale, _row_stats(weights, kept)


def e8m0_values(scale: torch.Tensor) -> torch.Tensor:
    """Return the fp32 powers of two of exponents U8; 255 is NaN."""
    import torch

    return scale.contiguous().view(torch.float8_e8m0fnu).to(torch.float32)


def dequantize_mxfp8(codes: torch.Tensor, multiplier: torch.Tensor) -> torch.Tensor:
    """Return fp32 weights [n, K] of e4m3 codes [n, K] and fp32 multipliers [n, K/32]."""
    return codes.float() * multiplier.repeat_interleave(MX_GROUP, dim=1)


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


def _row_stats(weights: torch.Tensor, kept: torch.Tensor) -> RowStats:
    from mtp_kernels.quantize.reference import row_stats

    return row_stats(weights, kept.flatten(1))


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
    return _squared(groups, e2m1_values(e2m1_codes(groups / multiplier)) * multiplier)


def _squared(groups: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    import torch

    from mtp_kernels.quantize.reference import halve

    return halve((groups - kept).to(torch.float64).square())


def _powers(
    weights: torch.Tensor,
    top: tuple[float, int],
    rounded: Callable[[torch.Tensor], torch.Tensor],
    *,
    sweep: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return weights [n, K] over their scales, to be rounded, the scales [n, K/32], and what is
    kept of the weights."""
    import torch

    groups = weights.reshape(len(weights), -1, MX_GROUP)
    mantissa, exponent = torch.frexp(groups.abs().amax(dim=2))
    above = (mantissa > top[0]).to(torch.int32)
    exponent = torch.where(mantissa == 0, 0, exponent - top[1] + above)
    scale = (exponent + E8M0_BIAS).clamp(0, E8M0_LAST).to(torch.uint8)

    def of(scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        multiplier = e8m0_values(scale)[..., None]
        numbers = groups / multiplier
        return numbers, rounded(numbers) * multiplier

    if sweep:
        lower = (scale.to(torch.int32) - 1).clamp(min=0).to(torch.uint8)
        smaller = _squared(groups, of(lower)[1]) < _squared(groups, of(scale)[1])
        scale = torch.where(smaller, lower, scale)
    numbers, kept = of(scale)
    return numbers.flatten(1), scale, kept.flatten(1)


def _as_e2m1(values: torch.Tensor) -> torch.Tensor:
    return e2m1_values(e2m1_codes(values))


def _as_e4m3(values: torch.Tensor) -> torch.Tensor:
    import torch

    return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).to(torch.float32)
