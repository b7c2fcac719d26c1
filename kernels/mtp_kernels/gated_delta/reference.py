"""Reference backend: a row at a time, in torch's operations, on any device and in any dtype.

Every operation has the shape of one row, so that its bits do not depend on what is beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

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
    taps = weight.float().t().contiguous()

    def step(
        S: torch.Tensor, window: torch.Tensor, gates: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        log_decay, beta = gates
        return delta_rule(S, heads_of(window, taps, sizes), log_decay, beta)

    out = inputs.new_empty(len(inputs), sizes.value_heads, sizes.value)
    return walk(Walked(inputs, gates, state, layout), sizes.width, step, out)


class Walked(NamedTuple):
    """Rows of a pass, raw inputs [T, channels] and gates [T, 2, Hv], and the states that they
    advance."""

    inputs: torch.Tensor
    gates: torch.Tensor
    state: DeltaState
    layout: StateLayout


# Takes a state [Hv, V, K] through a row, given the raw rows that its convolution covers
# [width, channels] and its gates [2, Hv]; returns the state, and what is read from it [Hv, V].
Step = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor],
    tuple[torch.Tensor, torch.Tensor],
]


def walk(rows: Walked, width: int, step: Step, out: torch.Tensor) -> torch.Tensor:
    """Return out [T, Hv, V] with what each row reads, and advance the states, request by request:
    accepted drafts of the pass before are replayed, and drafts of this one stay out of them."""
    inputs, gates, state, layout = rows
    starts = layout.cu_rows.tolist()
    for request, slot in enumerate(layout.slots.tolist()):
        own = slice(starts[request], starts[request + 1])
        replayed = int(layout.replayed[request])
        known = width - 1 + replayed
        raw = torch.cat([state.inputs[slot, :known], inputs[own]])
        row_gates = torch.cat([state.gates[slot, :replayed], gates[own]])
        stored = replayed + int(layout.certain[request])
        S = state.states[slot].clone()
        for row, its_gates in enumerate(row_gates):
            S, read = step(S, raw[row : row + width], its_gates)
            if row + 1 == stored:
                state.states[slot] = S
            if row >= replayed:
                out[own.start + row - replayed] = read
        drafts = len(row_gates) - stored
        state.inputs[slot, : width - 1 + drafts] = raw[stored:]
        state.gates[slot, :drafts] = row_gates[stored:]
    return out


def heads_of(
    window: torch.Tensor, taps: torch.Tensor, sizes: DeltaSizes
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries and keys [Hv, K] and values [Hv, V] of a row, in float32.

    window: the row and those before it [width, channels]; taps [width, channels].
    """
    query, key, value = split_heads(functional.silu(convolved(window, taps)), sizes)
    query, key = (_normed(heads) for heads in (query, key))
    return by_value_head(query * sizes.key**-0.5, sizes), by_value_head(key, sizes), value


def convolved(
    window: torch.Tensor, taps: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the convolution [channels] of a row, in the dtype of its rows; bias [channels]."""
    total = window[0].float() * taps[0]
    for row, tap in zip(window[1:], taps[1:], strict=True):
        total = total + row.float() * tap
    return (total if bias is None else total + bias).to(window.dtype)


def split_heads(
    row: torch.Tensor, sizes: DeltaSizes
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries and keys [Hk, K] and values [Hv, V] of a row [channels], in float32."""
    width = sizes.key_heads * sizes.key
    query, key, value = torch.split(row.float(), [width, width, sizes.output])
    return query.view(-1, sizes.key), key.view(-1, sizes.key), value.view(-1, sizes.value)


def by_value_head(heads: torch.Tensor, sizes: DeltaSizes) -> torch.Tensor:
    """Return queries or keys [Hk, K] for each value head, [Hv, K]."""
    return heads.repeat_interleave(sizes.value_heads // sizes.key_heads, dim=0)


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
