"""Recursion of an MTP module over whole texts, under autograd.

A draft of depth j attends to the first depth's keys up to the slot where its chain began and to the
deeper keys of its own chain, exactly as in decoding with a refreshed cache.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from mtp_checkpoints.errors import UnsupportedError
from mtp_runtime.layers.attention import Attention, ExpandedAttention
from mtp_runtime.models.execution import DraftModule

Entry = tuple[Tensor, Tensor]


@dataclass
class RecursiveChains:
    """Chains of drafts by recursion of a module, grown by one draft at a time.

    hidden [b, s, d] is what the target feeds the module; tokens [b, s]. A chain is named by the
    slot that it starts at, of all b * s side by side: its draft of depth j (from 0) is fed the
    token j + 1 places after it, and predicts the one after that.
    """

    module: DraftModule
    hidden: Tensor
    tokens: Tensor
    _depth: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._attention = expanded(self.module.attention)
        self._starts = torch.arange(self.tokens.numel(), device=self.tokens.device)
        self._fed = self.hidden.flatten(0, 1)
        self._chain: list[Entry] = []  # keys [n, h, k] and values [n, h, v] of deeper drafts

    def drafts(self, starts: Tensor) -> Tensor:
        """Grow the chains that start at these slots [n], ascending, and drop all others; returns
        the module's outputs [n, d] after its norm."""
        first, length = self._depth == 0, self.tokens.shape[1]
        rows = self._starts if first else self._kept(starts)
        positions = rows % length + self._depth
        following = self.tokens.flatten().roll(-1 - self._depth)[rows]
        taken, residual = self.module.entering(following, self._fed, positions)
        cos_sin = self._attention.rope.cos_sin(positions)
        query, key, value, gate = self._attention.expanded(taken, cos_sin)
        if first:
            shape = (*self.tokens.shape, *key.shape[1:-1], -1)
            self._whole = key.view(shape).transpose(1, 2), value.view(shape).transpose(1, 2)
            query, residual = query.index_select(0, starts), residual.index_select(0, starts)
            gate = None if gate is None else gate.index_select(0, starts)
        else:
            self._chain.append((key, value))
        mixed = self._mixed(query, starts)
        mixed = mixed if gate is None else mixed * gate
        attended = self._attention.output(mixed.flatten(1))
        x = self.module.leaving(residual, attended)
        normed = self.module.head.normed(x)
        self._starts, self._fed = starts, self.module.recycled(x, normed)
        self._depth += 1
        return normed

    def _kept(self, starts: Tensor) -> Tensor:
        """Drop what is held of all chains but those that start at these slots; returns these."""
        places = torch.searchsorted(self._starts, starts)
        self._fed = self._fed.index_select(0, places)
        self._chain = [
            (k.index_select(0, places), v.index_select(0, places)) for k, v in self._chain
        ]
        return starts

    def _mixed(self, query: Tensor, starts: Tensor) -> Tensor:
        """Attend with scaled queries [n, h, k]: to their texts' first keys up to where their chains
        start, and to the deeper ones of their chains. Returns [n, h, v]."""
        keys, values = self._whole  # [b, h, s, k], [b, h, s, v]
        by_text = ByText.of(starts, *self.tokens.shape)
        scores = by_text.spread(query) @ keys.transpose(-1, -2) + by_text.mask.to(query.dtype)
        deeper_scores = [
            by_text.spread((query * key).sum(-1, keepdim=True)) for key, _ in self._chain
        ]
        weights = torch.softmax(torch.cat([scores, *deeper_scores], dim=-1), dim=-1).to(
            values.dtype
        )
        sizes = [keys.shape[-2], *[1] * len(deeper_scores)]
        first, *deeper = torch.split(weights, sizes, dim=-1)
        mixed = first @ values
        for weight, (_, value) in zip(deeper, self._chain, strict=True):
            mixed = mixed + weight * by_text.spread(value)
        return by_text.gather(mixed)


@dataclass(frozen=True)
class ByText:
    """Rows [n] of several texts as a table [b, a], filled up to the text that has most of them.

    rows [b * a]: the row at every place. places [n]: the place of every row. mask [b, 1, a, s] is
    -inf for slots of a text that come after the row's own.
    """

    rows: Tensor
    places: Tensor
    mask: Tensor

    @classmethod
    def of(cls, slots: Tensor, texts: int, length: int) -> ByText:
        """Lay out rows by their slots [n] of all texts side by side, ascending."""
        owners = slots // length
        counts = torch.bincount(owners, minlength=texts)
        width = max(1, int(counts.max()))
        columns = torch.arange(len(slots), device=slots.device)
        columns = columns - (counts.cumsum(0) - counts)[owners]
        places = owners * width + columns
        rows, last = slots.new_zeros(texts * width), slots.new_zeros(texts * width)
        rows[places] = torch.arange(len(slots), device=slots.device)
        last[places] = slots % length
        later = torch.arange(length, device=slots.device) > last[:, None]
        mask = torch.zeros_like(later, dtype=torch.float32).masked_fill_(later, -torch.inf)
        return cls(rows, places, mask.view(texts, 1, width, length))

    def spread(self, values: Tensor) -> Tensor:
        """Return values [n, h, ...] as a table [b, h, a, ...]."""
        table = values.index_select(0, self.rows)
        return table.view(len(self.mask), -1, *values.shape[1:]).transpose(1, 2)

    def gather(self, table: Tensor) -> Tensor:
        """Return the rows [n, h, ...] of a table [b, h, a, ...]."""
        return table.transpose(1, 2).flatten(0, 1).index_select(0, self.places)


def expanded(attention: Attention) -> ExpandedAttention:
    """Return an attention that can be trained (UnsupportedError for any other)."""
    if isinstance(attention, ExpandedAttention):
        return attention
    raise UnsupportedError(
        "Drafts with this attention cannot be trained",
        expected="latent or grouped-query attention",
        found=type(attention).__name__,
    )
