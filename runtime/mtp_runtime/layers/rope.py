"""Rotary positions as DeepSeek stores them: neighbouring elements form a complex pair.

Source: Su et al., RoFormer; Peng et al., YaRN, sections 3.2 to 3.4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from mtp_runtime.config import RopeConfig


def inverse_frequencies(config: RopeConfig) -> torch.Tensor:
    """Rotation in radians per position of each pair [r/2], float32."""
    exponents = torch.arange(0, config.size, 2, dtype=torch.float32) / config.size
    plain = 1.0 / config.theta**exponents
    if config.factor <= 1.0:
        return plain
    low = max(math.floor(_pair_that_turns(config, config.beta_fast)), 0)
    high = min(math.ceil(_pair_that_turns(config, config.beta_slow)), config.size - 1)
    pair = torch.arange(config.size // 2, dtype=torch.float32)
    stretched = ((pair - low) / max(high - low, 1e-3)).clamp(0, 1)
    return plain / config.factor * stretched + plain * (1 - stretched)


def _pair_that_turns(config: RopeConfig, turns: float) -> float:
    """The pair, as a real number, that turns so often over the original positions."""
    wavelength = config.original_positions / (turns * 2 * math.pi)
    return config.size * math.log(wavelength) / (2 * math.log(config.theta))


def yarn_temperature(factor: float, mscale: float) -> float:
    """yarn's attention temperature, 1 without stretching."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def softmax_scale(config: RopeConfig, head_size: int) -> float:
    """The factor on attention scores: 1/sqrt(nope + rope), times yarn's temperature squared."""
    temperature = 1.0
    if config.mscale_all_dim:
        temperature = yarn_temperature(config.factor, config.mscale_all_dim)
    return float(head_size**-0.5 * temperature**2)


@dataclass(frozen=True)
class Rope:
    """Turns pairs by position. inverse [r/2] float32; amplitude scales every rotation."""

    inverse: torch.Tensor
    amplitude: float

    @classmethod
    def build(cls, config: RopeConfig, device: torch.device) -> Rope:
        """Precompute from the config. mscale equals mscale_all_dim in every released model."""
        amplitude = yarn_temperature(config.factor, config.mscale)
        if config.mscale_all_dim:
            amplitude /= yarn_temperature(config.factor, config.mscale_all_dim)
        return cls(inverse_frequencies(config).to(device), amplitude)

    def rotations(self, positions: torch.Tensor) -> torch.Tensor:
        """Complex factors [T, r/2] for positions [T]."""
        angles = positions.float()[:, None] * self.inverse
        return torch.polar(torch.full_like(angles, self.amplitude), angles)


def rotate(x: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
    """Turn x [..., r] by complex rotations that broadcast to [..., r/2]; pairs stay in place."""
    pairs = torch.view_as_complex(x.float().view(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rotations).flatten(-2).to(x.dtype)
