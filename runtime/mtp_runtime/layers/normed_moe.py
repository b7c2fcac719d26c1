"""Mixture of experts between norms of its own, whose router takes rows as they come.

Source: transformers' gemma4, with enable_moe_block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mtp_kernels.sizes import Routing
from mtp_runtime.layers.moe import Experts, Mlp
from mtp_runtime.layers.norm import RmsNorm


@dataclass(frozen=True)
class NormedRouter:
    """Picks experts by their shares of the softmax over all, of normed rows.

    norm has the weight [d] that normed rows are multiplied by; weight [d, e] and expert_scales [e],
    which the weights of what is picked are multiplied by, are float32.
    """

    norm: RmsNorm
    weight: torch.Tensor
    expert_scales: torch.Tensor
    routing: Routing

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return expert ids [T, k] and their weights [T, k], float32, for x [T, d]."""
        shares = torch.mm(self.norm(x.float()), self.weight).softmax(dim=-1)  # [T, e]
        weights, picked = shares.topk(self.routing.experts_per_token, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        return picked, weights * self.expert_scales[picked]


@dataclass(frozen=True)
class NormedMoe:
    """Routed experts, which take rows after a norm; another norm follows their sum."""

    router: NormedRouter
    norm: RmsNorm
    experts: Experts
    output_norm: RmsNorm

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Transform rows x [T, d] of the stream to [T, d]."""
        picked, weights = self.router(x)
        total = self.experts.routed(self.norm(x), picked, weights)
        return self.output_norm(total.to(x.dtype))


@dataclass(frozen=True)
class MlpBeside:
    """MLP beside a mixture of experts; a norm follows it."""

    mlp: Mlp
    output_norm: RmsNorm

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Transform normed rows x [T, d] to [T, d]."""
        return self.output_norm(self.mlp(x))
