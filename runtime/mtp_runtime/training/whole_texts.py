"""Attention over whole texts under autograd: every row attends to those before it in its text."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mtp_kernels.gated_delta.reference import NORM_EPS
from mtp_runtime.layers.attention import Attention, ExpandedAttention
from mtp_runtime.layers.gated_delta_net import GatedDeltaNet
from mtp_runtime.training.delta_rule import DeltaInputs, delta_rule
from mtp_runtime.training.recursion import expanded


def attend_over(attention: Attention, x: Tensor, texts: int) -> Tensor:
    """Attend from rows x [b * s, d] of texts of one length; returns [b * s, d] (UnsupportedError
    for an attention that is not trained)."""
    if isinstance(attention, GatedDeltaNet):
        return _delta(attention, x, texts)
    trained = expanded(attention)
    positions = torch.arange(len(x) // texts, device=x.device).repeat(texts)
    query, key, value, gate = trained.expanded(x, trained.rope.cos_sin(positions))
    query, key, value = (
        rows.view(texts, -1, *rows.shape[1:]).transpose(1, 2) for rows in (query, key, value)
    )  # [b, h, s, k]
    mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=1.0)
    mixed = mixed.transpose(1, 2).flatten(0, 1)
    return trained.output((mixed if gate is None else mixed * gate).flatten(1))


def takes_whole_texts(attention: Attention) -> bool:
    """True for an attention that attend_over takes."""
    if isinstance(attention, GatedDeltaNet):
        return True
    window = getattr(attention, "window", None)
    return isinstance(attention, ExpandedAttention) and window is None


def _delta(net: GatedDeltaNet, x: Tensor, texts: int) -> Tensor:
    """Take rows x [b * s, d] through the states of their texts, all texts side by side."""
    sizes = net.sizes
    rows, gate = torch.split(net.inputs(x), [sizes.channels, sizes.output], dim=1)
    beta, decay = (
        net.gate_inputs(x).view(texts, -1, 2 * len(net.rate)).transpose(1, 2).chunk(2, dim=1)
    )
    decay = net.rate[:, None] * F.softplus(decay + net.bias[:, None])  # [b, h, s]
    inputs = DeltaInputs(
        *_heads(net, rows.reshape(texts, -1, sizes.channels)), decay, beta.sigmoid()
    )
    state = x.new_zeros(texts, sizes.value_heads, sizes.key, sizes.value)
    out = delta_rule(inputs, state)[0].transpose(1, 2).flatten(0, 1)  # [b * s, h, v]
    return net.output(net.norm(out, gate.reshape(out.shape)).flatten(1))


def _heads(net: GatedDeltaNet, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries and keys [b, h, s, k] and values [b, h, s, v] of raw rows [b, s, c]."""
    sizes, width, texts = net.sizes, net.convolution.shape[1], len(rows)
    padded = F.pad(rows.transpose(1, 2), (width - 1, 0))
    taken = F.silu(F.conv1d(padded, net.convolution[:, None], groups=len(net.convolution)))
    keys = sizes.key_heads * sizes.key
    query, key, value = torch.split(taken, [keys, keys, sizes.output], dim=1)
    each = sizes.value_heads // sizes.key_heads
    query, key, value = (
        part.reshape(texts, -1, size, part.shape[2]).transpose(2, 3)
        for part, size in ((query, sizes.key), (key, sizes.key), (value, sizes.value))
    )
    query, key = (
        (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + NORM_EPS)).repeat_interleave(
            each, dim=1
        )
        for part in (query, key)
    )
    return query * sizes.key**-0.5, key, value
