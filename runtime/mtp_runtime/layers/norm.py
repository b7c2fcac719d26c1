"""RMS norm and layer norm, computed in float32 for activations of any dtype."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RmsNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; weight [d] is float32, offset
    what was added to it as it is stored."""

    weight: torch.Tensor
    eps: float
    offset: float = 0.0

    @classmethod
    def build(cls, weight: torch.Tensor, eps: float, offset: float = 0.0) -> RmsNorm:
        """Build from a weight [d] as it is stored: less the offset."""
        return cls(weight.float() + offset, eps, offset)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.rms_norm(x.float(), self.weight.shape, self.weight, self.eps).to(x.dtype)


@dataclass(frozen=True)
class LayerNorm:
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last dimension; weight and bias
    [d] are float32."""

    weight: torch.Tensor
    bias: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        normed = torch.layer_norm(x.float(), self.weight.shape, self.weight, self.bias, self.eps)
        return normed.to(x.dtype)
