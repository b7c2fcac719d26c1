"""Rotary position embedding. A complex pair is two neighbouring elements, as DeepSeek stores them,
or an element of either half.

Source: Su et al., RoFormer; Peng et al., YaRN, sections 3.2 to 3.4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from mtp_runtime.config import RopeConfig


def inverse_frequencies(config: RopeConfig) -> torch.Tensor:
    """Return inv_freq [r/2], float32: the angle per position of each pair, in radians."""
    exponents = torch.arange(0, config.size, 2, dtype=torch.float32) / config.size
    plain = 1.0 / config.theta**exponents
    if config.factor <= 1.0:
        return plain
    low = max(math.floor(_pair_of_rotations(config, config.beta_fast)), 0)
    high = min(math.ceil(_pair_of_rotations(config, config.beta_slow)), config.size - 1)
    pair = torch.arange(config.size // 2, dtype=torch.float32)
    interpolated = ((pair - low) / max(high - low, 1e-3)).clamp(0, 1)
    return plain / config.factor * interpolated + plain * (1 - interpolated)


def _pair_of_rotations(config: RopeConfig, rotations: float) -> float:
    """Return the pair, as a real number, that rotates so often over the original positions."""
    wavelength = config.original_positions / (rotations * 2 * math.pi)
    return config.size * math.log(wavelength) / (2 * math.log(config.theta))


def yarn_temperature(factor: float, mscale: float) -> float:
    """Return YaRN's attention temperature, 1 without stretching."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def softmax_scale(config: RopeConfig, head_size: int) -> float:
    """Return the factor on attention scores: 1/sqrt(head_size), times YaRN's temperature squared
    where the config sets mscale_all_dim."""
    temperature = 1.0
    if config.mscale_all_dim:
        temperature = yarn_temperature(config.factor, config.mscale_all_dim)
    return float(head_size**-0.5 * temperature**2)


@dataclass(frozen=True, eq=False)
class Rope:
    """Rotation of pairs by position. inv_freq [r/2] float32; attention_scaling is the length of
    every rotation."""

    inv_freq: torch.Tensor
    attention_scaling: float

    @classmethod
    def build(cls, config: RopeConfig, device: torch.device) -> Rope:
        """Precompute from the config; mscale equals mscale_all_dim in every released model."""
        scaling = yarn_temperature(config.factor, config.mscale)
        if config.mscale_all_dim:
            scaling /= yarn_temperature(config.factor, config.mscale_all_dim)
        return cls(inverse_frequencies(config).to(device), scaling)

    @property
    def size(self) -> int:
        """Number of rotated elements r."""
        return 2 * len(self.inv_freq)

    def cos_sin(self, positions: torch.Tensor) -> torch.Tensor:
        """Return cos + i sin of the angles at positions [T], times attention_scaling: [T, r/2]."""
        angles = positions.float()[:, None] * self.inv_freq
        return torch.polar(torch.full_like(angles, self.attention_scaling), angles)


def rotate_pairs(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotate neighbouring pairs of x [..., r] by complex factors that broadcast to [..., r/2]."""
    pairs = torch.view_as_complex(x.float().view(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * cos_sin).flatten(-2).to(x.dtype)


def rotate_first_pairs(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotate neighbouring pairs among the first r elements of x [..., n] as rotate_pairs does."""
    size = 2 * cos_sin.shape[-1]
    rotated = rotate_pairs(x[..., :size].contiguous(), cos_sin)
    return torch.cat([rotated, x[..., size:]], dim=-1)


def rotate_halves(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first r elements of x [..., n] by complex factors that broadcast to [..., r/2];
    element i forms a pair with element i + r/2."""
    size = cos_sin.shape[-1]
    real, imaginary, rest = x[..., :size], x[..., size : 2 * size], x[..., 2 * size :]
    turned = torch.complex(real.float(), imaginary.float()) * cos_sin
    return torch.cat([turned.real.to(x.dtype), turned.imag.to(x.dtype), rest], dim=-1)
