"""Recursion of an MTP module over whole texts, under autograd.

A query of depth j attends to the first depth's keys up to the slot where its chain began and to the
deeper keys of its own chain, exactly as in decoding with a refreshed cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from mtp_export.errors import UnsupportedError
from mtp_runtime.layers.attention import Attention, ExpandedAttention
from mtp_runtime.models.model import Head

Entry = tuple[Tensor, Tensor]


class ChainModule(Protocol):
    """A module of one layer that drafts by recursion, with the parts of its layer apart."""

    @property
    def head(self) -> Head: ...

    @property
    def attention(self) -> Attention: ...

    def entering(self, next_tokens: Tensor, hidden: Tensor, positions: Tensor) -> Entry:
        """Return what attention takes, and what its output is added to, of tokens [T], hidden
        states [T, d] and positions [T]."""

    def leaving(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Return the output [T, d] before the norm, given that of attention [T, d]."""

    def recycled(self, x: Tensor, normed: Tensor) -> Tensor:
        """Return the side of its norm on which the output is fed to the next draft."""


def draft_outputs(module: ChainModule, hidden: Tensor, tokens: Tensor, depths: int) -> list[Tensor]:
    """Return the module's output [b, s, d] after its norm for each depth, slot by slot.

    hidden [b, s, d] is what the target feeds it; tokens [b, s + depths], of which slot i is fed
    token i + 1 + depth. Output j (from 0) of slot i predicts token i + 2 + j.
    """
    batch, length, size = hidden.shape
    attention = expanded(module.attention)
    mask, fed = causal_mask(length, hidden.device), hidden.flatten(0, 1)
    chain: list[tuple[Tensor, Tensor]] = []
    outputs = []
    for depth in range(depths):
        positions = torch.arange(depth, depth + length, device=hidden.device).repeat(batch)
        following = tokens[:, 1 + depth : 1 + depth + length].flatten()
        taken, residual = module.entering(following, fed, positions)
        heads = attention.expanded(taken, attention.rope.cos_sin(positions))
        query, key, value = (
            each.view(batch, length, *each.shape[1:]).transpose(1, 2) for each in heads
        )
        chain.append((key, value))
        mixed = attend_chain(query, chain, mask)  # [b, h, s, v]
        attended = attention.output(mixed.transpose(1, 2).flatten(2).flatten(0, 1))
        x = module.leaving(residual, attended)
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
