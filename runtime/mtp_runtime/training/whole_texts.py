"""Attention over whole texts under autograd: every row attends to those before it in its text."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mtp_kernels.gated_delta.reference import NORM_EPS
from mtp_runtime.cache import CacheSpec, LayerCache
from mtp_runtime.layers.attention import Attention, ExpandedAttention, ForwardPass
from mtp_runtime.layers.gated_delta_net import GatedDeltaNet
from mtp_runtime.training.delta_rule import DeltaInputs, delta_rule
from mtp_runtime.training.recursion import expanded


@dataclass(frozen=True)
class OverTexts(Attention):
    """An attention over the rows [b * s, d] of texts of one length; nothing is cached."""

    attention: Attention
    texts: int

    def new_cache(self, spec: CacheSpec) -> LayerCache:
        """Nothing is kept."""
        return ()

    def __call__(
        self, x: Tensor, cache: LayerCache = (), forward: ForwardPass | None = None
    ) -> Tensor:
        """Attend from rows x [b * s, d] (UnsupportedError for an attention that is not trained)."""
        if isinstance(self.attention, GatedDeltaNet):
            return _delta(self.attention, x, self.texts)
        attention = expanded(self.attention)
        positions = torch.arange(len(x) // self.texts, device=x.device).repeat(self.texts)
        *rows, gate = attention.expanded(x, attention.rope.cos_sin(positions))
        query, key, value = (
            each.unflatten(0, (self.texts, -1)).transpose(1, 2) for each in rows if each is not None
        )  # [b, h, s, k]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=1.0)
        mixed = mixed.transpose(1, 2).flatten(0, 1)
        return attention.output((mixed if gate is None else mixed * gate).flatten(1))


def takes_whole_texts(attention: Attention) -> bool:
    """True for an attention that OverTexts takes."""
    if isinstance(attention, GatedDeltaNet):
        return True
    window = getattr(attention, "window", None)
    return isinstance(attention, ExpandedAttention) and window is None


def _delta(net: GatedDeltaNet, x: Tensor, texts: int) -> Tensor:
    """Take rows x [b * s, d] through the states of their texts, all texts side by side."""
    sizes = net.sizes
    rows, gate = torch.split(net.inputs(x), [sizes.channels, sizes.output], dim=1)
    beta, decay = net.gate_inputs(x).unflatten(0, (texts, -1)).transpose(1, 2).chunk(2, dim=1)
    decay = net.rate[:, None] * F.softplus(decay + net.bias[:, None])  # [b, h, s]
    inputs = DeltaInputs(*_heads(net, rows.unflatten(0, (texts, -1))), decay, beta.sigmoid())
    state = x.new_zeros(texts, sizes.value_heads, sizes.key, sizes.value)
    out = delta_rule(inputs, state)[0].transpose(1, 2).flatten(0, 1)  # [b * s, h, v]
    return net.output(net.norm(out, gate.reshape(out.shape)).flatten(1))


def _heads(net: GatedDeltaNet, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries and keys [b, h, s, k] and values [b, h, s, v] of raw rows [b, s, c]."""
    sizes, width = net.sizes, net.convolution.shape[1]
    padded = F.pad(rows.transpose(1, 2), (width - 1, 0))
    taken = F.silu(F.conv1d(padded, net.convolution[:, None], groups=len(net.convolution)))
    keys = sizes.key_heads * sizes.key
    query, key, value = torch.split(taken, [keys, keys, sizes.output], dim=1)
    each = sizes.value_heads // sizes.key_heads
    query, key, value = (
        part.unflatten(1, (-1, size)).transpose(2, 3)
        for part, size in ((query, sizes.key), (key, sizes.key), (value, sizes.value))
    )
    query, key = (
        (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + NORM_EPS)).repeat_interleave(
            each, dim=1
        )
        for part in (query, key)
    )
    return query * sizes.key**-0.5, key, value
