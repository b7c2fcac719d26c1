"""RMS norm, computed in float32 whatever the activations are."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RmsNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension d.

    Kept as x / hypot(|x|, sqrt(d eps)) * (sqrt(d) weight): four operations where torch.rms_norm
    takes many on a CPU, and no constant to convert. scaled_weight [d], floor [1], float32.
    """

    scaled_weight: torch.Tensor
    floor: torch.Tensor

    @classmethod
    def build(cls, weight: torch.Tensor, eps: float) -> RmsNorm:
        """weight [d] as it is stored."""
        size = weight.shape[0]
        floor = torch.tensor([math.sqrt(size * eps)], device=weight.device)
        return cls(weight.float() * math.sqrt(size), floor)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scaled = torch.div(wide, torch.hypot(length, self.floor))
        return scaled.mul_(self.scaled_weight).to(x.dtype)
