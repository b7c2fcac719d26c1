"""Recursion of an MTP module over whole texts, under autograd.

A query of depth j attends to the first depth's keys up to the slot where its chain began and to the
deeper keys of its own chain, exactly as in decoding with a refreshed cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mtp_export.errors import UnsupportedError
from mtp_runtime.layers.attention import Attention, ExpandedAttention
from mtp_runtime.models.model import MtpModule


def draft_outputs(module: MtpModule, hidden: Tensor, tokens: Tensor, depths: int) -> list[Tensor]:
    """Return the module's output [b, s, d] after its norm for each depth, slot by slot.

    hidden [b, s, d] is what the target feeds it; tokens [b, s + depths], of which slot i is fed
    token i + 1 + depth. Output j (from 0) of slot i predicts token i + 2 + j.
    """
    batch, length, size = hidden.shape
    layer, attention = module.layer, expanded(module.layer.attention)
    mask, fed = causal_mask(length, hidden.device), hidden.flatten(0, 1)
    chain: list[tuple[Tensor, Tensor]] = []
    outputs = []
    for depth in range(depths):
        positions = torch.arange(depth, depth + length, device=hidden.device).repeat(batch)
        following = tokens[:, 1 + depth : 1 + depth + length].flatten()
        x = module.joined(following, fed, positions)
        heads = attention.expanded(layer.input_norm(x), attention.rope.cos_sin(positions))
        query, key, value = (each.unflatten(0, (batch, length)).transpose(1, 2) for each in heads)
        chain.append((key, value))
        mixed = attend_chain(query, chain, mask)  # [b, h, s, v]
        x = x + attention.output(mixed.transpose(1, 2).flatten(2).flatten(0, 1))
        x = x + layer.feed_forward(layer.post_norm(x))
        normed = module.head.normed(x)
        outputs.append(normed.view(batch, length, size))
        fed = module.recycled(x, normed)
    return outputs


def attend_chain(query: Tensor, chain: Sequence[tuple[Tensor, Tensor]], mask: Tensor) -> Tensor:
    """Attend with scaled queries [b, h, s, n]: causally to the first keys, by slot to later ones;
    the chain holds keys [b, h, s, n] and values [b, h, s, v] of every depth."""
    keys, values = chain[0]
    scores = query @ keys.transpose(-1, -2) + mask.to(query.dtype)
    own = [(query * key).sum(-1, keepdim=True) for key, _ in chain[1:]]
    weights = torch.softmax(torch.cat([scores, *own], dim=-1), dim=-1).to(values.dtype)
    slots = keys.shape[-2]
    mixed = weights[..., :slots] @ values
    for index, (_, value) in enumerate(chain[1:], start=slots):
        mixed = mixed + weights[..., index : index + 1] * value
    return mixed


def causal_mask(length: int, device: torch.device) -> Tensor:
    """Return the additive causal mask [s, s]."""
    return torch.full((length, length), -1e9, device=device).triu(1)


def expanded(attention: Attention) -> ExpandedAttention:
    """Return an attention that can be trained (UnsupportedError for any other)."""
    if isinstance(attention, ExpandedAttention):
        return attention
    raise UnsupportedError(
        "Drafts with this attention cannot be trained",
        expected="latent or grouped-query attention",
        found=type(attention).__name__,
    )
