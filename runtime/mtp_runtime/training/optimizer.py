"""AdamW, and the course of its learning rate: warm-up, plateau, cosine decay."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Course:
    """Learning rate by step: decay_share is the last part of the steps, over which the rate falls
    to final_rate."""

    steps: int
    warmup_steps: int
    peak_rate: float
    final_rate: float
    decay_share: float

    def rate(self, step: int) -> float:
        """Return the learning rate at a step, from 0."""
        if step < self.warmup_steps:
            return self.peak_rate * (step + 1) / self.warmup_steps
        start = self.steps * (1 - self.decay_share)
        progress = min(max((step - start) / max(self.steps - start, 1), 0.0), 1.0)
        span = self.peak_rate - self.final_rate
        return self.final_rate + span * 0.5 * (1 + math.cos(math.pi * progress))


def adamw(
    decaying: Sequence[torch.nn.Parameter],
    others: Sequence[torch.nn.Parameter] = (),
    *,
    decay: float,
) -> torch.optim.AdamW:
    """Build AdamW with a weight decay of some parameters, and none of others."""
    groups = [
        {"params": list(decaying), "weight_decay": decay},
        {"params": list(others), "weight_decay": 0.0},
    ]
    filled = [group for group in groups if group["params"]]
    return torch.optim.AdamW(filled, lr=1e-3, betas=(0.9, 0.95), eps=1e-9, fused=True)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = rate
