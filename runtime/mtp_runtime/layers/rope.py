"""Rotary position embedding. A complex pair is two neighbouring elements, as DeepSeek stores them,
or an element of either half.

Source: Su et al., RoFormer; Peng et al., YaRN, sections 3.2 to 3.4.
"""

from __future__ import annotations

import math

import torch

from mtp_checkpoints.families import parts
from mtp_kernels import decoder


def inverse_frequencies(rope: parts.Rope) -> torch.Tensor:
    """Return inv_freq [r/2], float32: the angle per position of each pair, in radians."""
    exponents = torch.arange(0, rope.size, 2, dtype=torch.float32) / rope.size
    plain = 1.0 / rope.theta**exponents
    if rope.turning is not None:
        plain[rope.turning :] = 0.0
    yarn, llama3 = rope.yarn, rope.llama3
    if llama3 is not None:
        rotations = llama3.original_positions * plain / (2 * math.pi)
        band = llama3.high_frequency - llama3.low_frequency
        kept = ((rotations - llama3.low_frequency) / band).clamp(0, 1)
        return plain * kept + plain / llama3.factor * (1 - kept)
    if yarn is None or yarn.factor <= 1.0:
        return plain
    # Bounded first: of a config's tiniest beta the pair is infinite.
    fast, slow = (_pair_of_rotations(rope, yarn, beta) for beta in (yarn.beta_fast, yarn.beta_slow))
    low = math.floor(min(max(fast, 0), rope.size))
    high = math.ceil(min(slow, rope.size - 1))
    pair = torch.arange(rope.size // 2, dtype=torch.float32)
    interpolated = ((pair - low) / max(high - low, 1e-3)).clamp(0, 1)
    return plain / yarn.factor * interpolated + plain * (1 - interpolated)


def _pair_of_rotations(rope: parts.Rope, yarn: parts.Yarn, rotations: float) -> float:
    """Return the pair, as a real number, that rotates so often over the original positions."""
    assert yarn.original_positions is not None, "others are refused"
    wavelength = yarn.original_positions / (rotations * 2 * math.pi)
    return rope.size * math.log(wavelength) / (2 * math.log(rope.theta))


def yarn_temperature(factor: float, mscale: float) -> float:
    """Return YaRN's attention temperature, 1 without stretching."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def softmax_scale(rope: parts.Rope, head_size: int) -> float:
    """Return the factor on attention scores: 1/sqrt(head_size), times YaRN's temperature squared
    where config.json sets mscale_all_dim."""
    temperature = 1.0
    if rope.yarn is not None and rope.yarn.mscale_all_dim:
        temperature = yarn_temperature(rope.yarn.factor, rope.yarn.mscale_all_dim)
    return float(head_size**-0.5 * temperature**2)


class Rope(decoder.Rope):
    """Rotation of pairs by position, computed by torch."""

    @classmethod
    def build(cls, rope: parts.Rope, device: torch.device) -> Rope:
        """Precompute rotations; mscale equals mscale_all_dim in every released model."""
        scaling, yarn = 1.0, rope.yarn
        if yarn is not None:
            scaling = yarn_temperature(yarn.factor, yarn.mscale)
            if yarn.mscale_all_dim:
                scaling /= yarn_temperature(yarn.factor, yarn.mscale_all_dim)
        return cls(inverse_frequencies(rope).to(device), scaling)

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
