"""Mamba-2: a state space layer with a state per sequence, which every token decays, adds to and
reads.

Source: Dao and Gu, Transformers are SSMs (arXiv 2405.21060); transformers' nemotron_h.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from mtp_kernels.gated_delta import DeltaState
from mtp_kernels.sizes import DeltaSizes
from mtp_kernels.state_space import StateSpaceWeights, state_space
from mtp_runtime.cache import CacheSpec, LayerCache
from mtp_runtime.layers.attention import Attention, ForwardPass
from mtp_runtime.layers.gated_delta_net import clear_new
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
class Mamba2(Attention):
    """Projections around the recurrence; the cache is a state per sequence.

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
    sizes: DeltaSizes

    has_reference: ClassVar[bool] = False

    @property
    def row_elements(self) -> int:
        """Elements of what is projected, of what the convolution takes, and of outputs."""
        return 2 * self.sizes.channels + 3 * self.sizes.output

    def new_cache(self, spec: CacheSpec) -> LayerCache:
        """Make the states."""
        return DeltaState.empty(spec.states, spec.drafts, self.sizes, spec.dtype, spec.device)

    def __call__(self, x: torch.Tensor, cache: LayerCache, forward: ForwardPass) -> torch.Tensor:
        """Take rows x [T, d] through the states of their sequences; returns [T, d]."""
        assert isinstance(cache, DeltaState), "the cache that new_cache made"
        layout, sizes = forward.layout, self.sizes
        assert layout.states is not None, "a layout of sequences with states"
        clear_new([cache], layout)
        width, inner = sizes.key_heads * sizes.key, sizes.output
        gate, values, keys, queries, step = torch.split(
            self.inputs(x), [inner, inner, width, width, sizes.value_heads], dim=1
        )
        step = F.softplus(step.float() + self.bias)
        gates = torch.stack([self.rate * step, step], dim=1)
        rows = torch.cat([queries, keys, values], dim=1)
        read = state_space(rows, gates, self.weights, cache, layout.states, sizes)
        return self.output(self.norm(read.flatten(1), gate))
