"""State space layers of Mamba-2: a causal convolution with a bias, and a state per head that every
token decays, adds to and reads. The state of a request, and the replay of drafts, are a gated delta
net's; a state space adds to its state without correcting what it recalls.

Source: Dao and Gu, Transformers are SSMs (arXiv 2405.21060); transformers' nemotron_h.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

from mtp_kernels.batch_layout import StateLayout
from mtp_kernels.gated_delta.reference import (
    Walked,
    by_value_head,
    convolved,
    split_heads,
    walk,
)
from mtp_kernels.gated_delta.state import DeltaState, check_layout, check_rows, check_state
from mtp_kernels.sizes import DeltaSizes
from mtp_kernels.tensor_checks import check_tensor


class StateSpaceWeights(NamedTuple):
    """Weights of a state space around its recurrence.

    convolution [channels, width] and convolution_bias [channels], in the dtype of rows; skip [Hv],
    float32: the share of a row's own values that is added to what it reads.
    """

    convolution: torch.Tensor
    convolution_bias: torch.Tensor
    skip: torch.Tensor


@torch.no_grad()
def state_space(
    inputs: torch.Tensor,
    gates: torch.Tensor,
    weights: StateSpaceWeights,
    state: DeltaState,
    layout: StateLayout,
    sizes: DeltaSizes,
) -> torch.Tensor:
    """Return what heads read from their states [T, Hv, V], before the gated norm, in the dtype of
    inputs; advance the requests' states.

    inputs [T, channels] raw rows [C | B | x] of all heads, before the convolution: what reads a
    state, what it is written by, and what is written; gates [T, 2, Hv] float32, the log of each
    head's decay and its step. Each row, replayed ones included, takes in float32, a row at a time:

        C, B, x = silu(convolution of the row and the width - 1 before it, with its bias)
        S = exp(log decay) * S + step * x B^T      head j has B and C of group j // (Hv / Hk)
        output = S C + skip * x

    state and layout, and what a row's bits depend on, are as gated_delta has them. Raises TypeError
    or ValueError for arguments that do not fit each other.
    """
    check_rows(inputs, gates, weights.convolution, sizes)
    dtype, exact = (inputs.dtype,), (torch.float32,)
    heads, device = sizes.value_heads, inputs.device
    check_tensor("bias", weights.convolution_bias, (sizes.channels,), dtype, device)
    check_tensor("skip", weights.skip, (heads,), exact, device)
    check_state(state, inputs, sizes)
    check_layout(layout, state, len(inputs))
    taps = weights.convolution.float().t().contiguous()
    bias, skip = weights.convolution_bias.float(), weights.skip[:, None]

    def step(
        S: torch.Tensor, window: torch.Tensor, gates: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        log_decay, size = gates
        query, key, value = split_heads(functional.silu(convolved(window, taps, bias)), sizes)
        written = (size[:, None] * value)[:, :, None] * by_value_head(key, sizes)[:, None, :]
        S = S * log_decay.exp()[:, None, None] + written
        read = (S * by_value_head(query, sizes)[:, None, :]).sum(-1)
        return S, read + skip * value

    out = inputs.new_empty(len(inputs), heads, sizes.value)
    return walk(Walked(inputs, gates, state, layout), sizes.width, step, out)
