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
        # Fewer operations than torch.rms_norm, which is composite on a CPU.
        wide = x.float()
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        size = self.weight.shape[0]
        inverse = length.square_().div_(size).add_(self.eps).rsqrt_()
        scaled: torch.Tensor = (wide * inverse).to(x.dtype)
        return scaled.mul_(self.weight)
