"""RMS norm, computed in float32 whatever the activations are."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RmsNorm:
    """x / rms(x) * weight over the last dimension d; weight [d]."""

    weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.float32:
            return torch.rms_norm(x, self.weight.shape, self.weight, self.eps)
        scaled = torch.rms_norm(x.float(), self.weight.shape, None, self.eps)
        return scaled.to(x.dtype) * self.weight
