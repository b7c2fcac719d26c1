"""Reference backend: a row at a time, in torch's operations, on any device and in any dtype.

Every operation has the shape of one row, so that its bits do not depend on what is beside it.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from mtp_kernels.batch_layout import StateLayout
from mtp_kernels.gated_delta.state import DeltaState
from mtp_kernels.sizes import DeltaSizes

NORM_EPS = 1e-6


def supports(inputs: torch.Tensor, sizes: DeltaSizes) -> bool:
    """Return True for all rows and sizes."""
    return True


@torch.no_grad()
def gated_delta(
    inputs: torch.Tensor,
    gates: torch.Tensor,
    weight: torch.Tensor,
    state: DeltaState,
    layout: StateLayout,
    sizes: DeltaSizes,
) -> torch.Tensor:
    """Return the outputs [T, Hv, V] and advance the state, request by request."""
    out = inputs.new_empty(len(inputs), sizes.value_heads, sizes.value)
    taps = weight.float().t().contiguous()
    starts = layout.cu_rows.tolist()
    for request, slot in enumerate(layout.slots.tolist()):
        own = slice(starts[request], starts[request + 1])
        replayed = int(layout.replayed[request])
        known = sizes.width - 1 + replayed
        rows = torch.cat([state.inputs[slot, :known], inputs[own]])
        row_gates = torch.cat([state.gates[slot, :replayed], gates[own]])
        stored = replayed + int(layout.certain[request])
        S = state.states[slot].clone()
        for row, (log_decay, beta) in enumerate(row_gates):
            heads = heads_of(rows[row : row + sizes.width], taps, sizes)
            S, read = delta_rule(S, heads, log_decay, beta)
            if row + 1 == stored:
                state.states[slot] = S
            if row >= replayed:
                out[own.start + row - replayed] = read
        drafts = len(row_gates) - stored
        state.inputs[slot, : sizes.width - 1 + drafts] = rows[stored:]
        state.gates[slot, :drafts] = row_gates[stored:]
    return out


def heads_of(
    window: torch.Tensor, taps: torch.Tensor, sizes: DeltaSizes
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries and keys [Hv, K] and values [Hv, V] of a row, in float32.

    window: the row and those before it [width, channels]; taps [width, channels].
    """
    total = window[0].float() * taps[0]
    for row, tap in zip(window[1:], taps[1:], strict=True):
        total = total + row.float() * tap
    convolved = functional.silu(total.to(window.dtype)).float()
    width = sizes.key_heads * sizes.key
    query, key, value = torch.split(convolved, [width, width, sizes.output])
    query, key = (_normed(heads.view(-1, sizes.key)) for heads in (query, key))
    each = sizes.value_heads // sizes.key_heads
    query = (query * sizes.key**-0.5).repeat_interleave(each, dim=0)
    return query, key.repeat_interleave(each, dim=0), value.view(-1, sizes.value)


def _normed(heads: torch.Tensor) -> torch.Tensor:
    """Return heads [h, K] of length 1."""
    return heads * torch.rsqrt((heads * heads).sum(-1, keepdim=True) + NORM_EPS)


def delta_rule(
    S: torch.Tensor,
    heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    log_decay: torch.Tensor,
    beta: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return S [Hv, V, K] after a row, and what is read from it [Hv, V]; gates [Hv]."""
    query, key, value = heads
    S = S * log_decay.exp()[:, None, None]
    recalled = (S * key[:, None, :]).sum(-1)
    S = S + (beta[:, None] * (value - recalled))[:, :, None] * key[:, None, :]
    return S, (S * query[:, None, :]).sum(-1)
