"""Mamba-2: a state space layer with a state per sequence, which every token decays, adds to and
reads.

Source: Dao and Gu, Transformers are SSMs (arXiv 2405.21060); transformers' nemotron_h.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from mtp_kernels.state_space import StateSpaceWeights, state_space
from mtp_runtime.cache import LayerCache
from mtp_runtime.layers.attention import ForwardPass
from mtp_runtime.layers.gated_delta_net import Recurrent
from mtp_runtime.layers.linear import Linear


@dataclass(frozen=True)
class GatedGroupNorm:
    """y / sqrt(mean(y^2) + eps) * weight, of y = x * silu(gate), the mean of each of the groups of
    equal size; weight [groups * v] is float32."""

    weight: torch.Tensor
    eps: float
    groups: int

    def __call__(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        gated = (x.float() * F.silu(gate.float())).view(len(x), self.groups, -1)
        normed = torch.rms_norm(gated, gated.shape[2:], eps=self.eps).flatten(1)
        return self.weight.to(x.dtype) * normed.to(x.dtype)


@dataclass(frozen=True)
class Mamba2(Recurrent):
    """Projections around the recurrence.

    inputs maps x to [output gates | values | keys | queries | steps], a key and a query for each
    group of heads. The step of a head is softplus(its input + bias), and the log of its decay that
    times rate, both float32 [h].
    """

    inputs: Linear
    weights: StateSpaceWeights
    rate: torch.Tensor
    bias: torch.Tensor
    norm: GatedGroupNorm
    output: Linear

    def __call__(self, x: torch.Tensor, cache: LayerCache, forward: ForwardPass) -> torch.Tensor:
        """Take rows x [T, d] through the states of their sequences; returns [T, d]."""
        (state, layout), sizes = self.states_of(cache, forward), self.sizes
        width, inner = sizes.key_heads * sizes.key, sizes.output
        gate, values, keys, queries, step = torch.split(
            self.inputs(x), [inner, inner, width, width, sizes.value_heads], dim=1
        )
        step = F.softplus(step.float() + self.bias)
        gates = torch.stack([self.rate * step, step], dim=1)
        rows = torch.cat([queries, keys, values], dim=1)
        read = state_space(rows, gates, self.weights, state, layout, sizes)
        return self.output(self.norm(read.flatten(1), gate))
