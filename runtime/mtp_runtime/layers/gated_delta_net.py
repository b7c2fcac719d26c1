"""Gated delta net: linear attention with a state per sequence, which every token decays, corrects
and reads.

Source: Yang et al., Gated Delta Networks (arXiv 2412.06464); transformers' qwen3_next and qwen3_5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from mtp_kernels.batch_layout import BatchLayout, StateLayout
from mtp_kernels.gated_delta import DeltaState, gated_delta
from mtp_kernels.sizes import DeltaSizes
from mtp_runtime.cache import CacheSpec, LayerCache
from mtp_runtime.layers.attention import Attention, ForwardPass
from mtp_runtime.layers.linear import Linear


@dataclass(frozen=True)
class GatedNorm:
    """x / sqrt(mean(x^2) + eps) * weight * silu(gate) over the last dimension; weight [v] is
    float32."""

    weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        normed = torch.rms_norm(x.float(), self.weight.shape, eps=self.eps).to(x.dtype)
        weighted = self.weight.to(x.dtype) * normed
        return (weighted * F.silu(gate.float())).to(x.dtype)


@dataclass(frozen=True)
class Recurrent(Attention):
    """Attention that reads a state per sequence, its cache, in place of keys and values."""

    sizes: DeltaSizes

    has_reference: ClassVar[bool] = False

    @property
    def row_elements(self) -> int:
        """Elements of what the convolution takes and gives, of output gates and outputs."""
        return 2 * self.sizes.channels + 3 * self.sizes.output

    def new_cache(self, spec: CacheSpec) -> LayerCache:
        """Make the states."""
        return DeltaState.empty(spec.states, spec.drafts, self.sizes, spec.dtype, spec.device)

    def states_of(self, cache: LayerCache, forward: ForwardPass) -> tuple[DeltaState, StateLayout]:
        """Return the states, cleared of sequences that begin in a pass, and its layout of them."""
        assert isinstance(cache, DeltaState), "the cache that new_cache made"
        layout = forward.layout
        assert layout.states is not None, "a layout of sequences with states"
        clear_new([cache], layout)
        return cache, layout.states


@dataclass(frozen=True)
class GatedDeltaNet(Recurrent):
    """Projections around the recurrence.

    inputs maps x to [queries | keys | values | output gates], gate_inputs to [betas | decays],
    heads side by side. A value head's log decay is rate * softplus(decay + bias), both float32 [h].
    """

    inputs: Linear
    gate_inputs: Linear
    convolution: torch.Tensor  # [channels, width], in the dtype of activations
    rate: torch.Tensor
    bias: torch.Tensor
    norm: GatedNorm
    output: Linear

    def __call__(self, x: torch.Tensor, cache: LayerCache, forward: ForwardPass) -> torch.Tensor:
        """Take rows x [T, d] through the states of their sequences; returns [T, d]."""
        (state, layout), sizes = self.states_of(cache, forward), self.sizes
        rows, gate = torch.split(self.inputs(x), [sizes.channels, sizes.output], dim=1)
        beta, decay = self.gate_inputs(x).chunk(2, dim=1)
        gates = torch.stack(
            [self.rate * F.softplus(decay.float() + self.bias), beta.sigmoid().float()], dim=1
        )
        out = gated_delta(rows.contiguous(), gates, self.convolution, state, layout, sizes)
        normed = self.norm(out, gate.reshape(out.shape))
        return self.output(normed.flatten(1))


def clear_new(states: Sequence[DeltaState], layout: BatchLayout) -> None:
    """Clear the states of sequences that begin in a pass, in some layers."""
    assert layout.states is not None, "a layout of sequences with states"
    first = layout.positions[layout.states.cu_rows[:-1].to(layout.positions.device)]
    for slot, position in zip(layout.states.slots.tolist(), first.tolist(), strict=True):
        for state in states if not position else ():
            state.clear(slot)
