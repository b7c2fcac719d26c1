"""DeepSeek-V3 and its MTP module: hidden states and logits at every row of a ragged batch.

Source: DeepSeek-V3 technical report, sections 2.1 and 2.2; the released weights concatenate
[embedding, hidden], the other way round than the report prints it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from mtp_runtime.config import Hidden, ModelConfig, MtpContract
from mtp_runtime.layers.attention import (
    TILE_ROWS,
    Attention,
    BatchLayout,
    canonical_attention,
    fused_attention,
)
from mtp_runtime.layers.linear import Linear
from mtp_runtime.layers.mla import Mla
from mtp_runtime.layers.moe import Mlp, Moe
from mtp_runtime.layers.norm import RmsNorm
from mtp_runtime.layers.rope import Rope

Rows = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Arithmetic:
    """How rows are computed: all at once, or so that a row's bits do not depend on its batch.

    Deterministic: every row-wise step runs on tiles of TILE_ROWS rows, the last one padded, so
    that each matrix product, and each vectorized loop, has one shape whatever the batch is.
    """

    deterministic: bool

    @property
    def attention(self) -> Attention:
        return canonical_attention if self.deterministic else fused_attention

    def by_rows(self, step: Callable[..., Rows], *tensors: torch.Tensor) -> Rows:
        """step on tensors that share their first dimension, in tiles where that is asked for."""
        if not self.deterministic:
            return step(*tensors)
        count = len(tensors[0])
        parts = []
        for at in range(0, count, TILE_ROWS):
            tile = [tensor[at : at + TILE_ROWS] for tensor in tensors]
            if len(tile[0]) < TILE_ROWS:
                tile = [_padded(tensor) for tensor in tile]
            parts.append(step(*(tensor.contiguous() for tensor in tile)))
        return tuple(torch.cat(columns)[:count] for columns in zip(*parts, strict=True))


def _padded(tensor: torch.Tensor) -> torch.Tensor:
    missing = TILE_ROWS - len(tensor)
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])])


@dataclass(frozen=True)
class DecoderLayer:
    """One layer: attention and feed-forward, each after a norm and added to the stream."""

    input_norm: RmsNorm
    attention: Mla
    post_norm: RmsNorm
    feed_forward: Mlp | Moe

    def __call__(
        self,
        x: torch.Tensor,  # [T, d]
        rotations: torch.Tensor,  # [T, r/2]
        kv_cache: torch.Tensor,  # [pages, page, c+r]
        layout: BatchLayout,
        arithmetic: Arithmetic,
    ) -> torch.Tensor:
        mla = self.attention

        def before(x: torch.Tensor, rotations: torch.Tensor) -> Rows:
            return mla.project(self.input_norm(x), rotations)

        q_latent, q_rope, cached = arithmetic.by_rows(before, x, rotations)
        kv_cache.flatten(0, 1).index_copy_(0, layout.slots, cached)
        attended = arithmetic.attention(q_latent, q_rope, kv_cache, layout, mla.scale)

        def after(x: torch.Tensor, attended: torch.Tensor) -> Rows:
            x = x + mla.finish(attended)
            normed = self.post_norm(x)
            if arithmetic.deterministic and isinstance(self.feed_forward, Moe):
                return (x + self.feed_forward.same_for_any_batch(normed),)
            return (x + self.feed_forward(normed),)

        return arithmetic.by_rows(after, x, attended)[0]


@dataclass(frozen=True)
class Head:
    """The last norm and the projection to the vocabulary."""

    norm: RmsNorm
    linear: Linear
    arithmetic: Arithmetic

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        return self.arithmetic.by_rows(lambda rows: (self.norm(rows),), x)[0]

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """float32 logits [T, vocab] of rows that passed the norm."""
        return self.arithmetic.by_rows(lambda rows: (self.linear(rows),), normed)[0].float()


@dataclass(frozen=True)
class MtpModule:
    """The MTP layer: the next token's embedding and a hidden state in, the token after it out."""

    embedding: torch.Tensor
    embedding_norm: RmsNorm
    hidden_norm: RmsNorm
    projection: Linear
    layer: DecoderLayer
    head: Head
    rope: Rope
    contract: MtpContract
    arithmetic: Arithmetic

    def __call__(
        self,
        next_tokens: torch.Tensor,  # [T]
        hidden: torch.Tensor,  # [T, d]
        kv_cache: torch.Tensor,
        layout: BatchLayout,
    ) -> torch.Tensor:
        """Rows at position i take token i+1 and hidden state i; returns [T, d] before the norm."""
        embedded = F.embedding(next_tokens, self.embedding)
        if self.contract.zero_first_embedding:
            embedded = embedded.masked_fill((layout.positions == 0)[:, None], 0.0)

        def combine(embedded: torch.Tensor, hidden: torch.Tensor) -> Rows:
            both = [self.embedding_norm(embedded), self.hidden_norm(hidden)]
            return (self.projection(torch.cat(both, dim=-1)),)

        x = self.arithmetic.by_rows(combine, embedded, hidden)[0]
        rotations = rotations_of(self.rope, self.arithmetic, layout)
        return self.layer(x, rotations, kv_cache, layout, self.arithmetic)

    def recycled(self, x: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        """What the next draft of a recursion takes as hidden state."""
        return normed if self.contract.recycled_hidden is Hidden.AFTER_NORM else x


@dataclass(frozen=True)
class DeepseekV3:
    """The main model, and the MTP module where the checkpoint has one."""

    config: ModelConfig
    embedding: torch.Tensor
    layers: tuple[DecoderLayer, ...]
    head: Head
    rope: Rope
    arithmetic: Arithmetic
    mtp: MtpModule | None

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def cache_layers(self) -> int:
        """Layers that keep keys and values, the MTP layer last."""
        return len(self.layers) + (self.mtp is not None)

    def __call__(
        self,
        tokens: torch.Tensor,  # [T]
        kv_cache: Sequence[torch.Tensor],  # of each layer, [pages, page, c+r]
        layout: BatchLayout,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states [T, d] of every row, before and after the last norm; fills the cache."""
        x = F.embedding(tokens, self.embedding)
        rotations = rotations_of(self.rope, self.arithmetic, layout)
        for layer, layer_cache in zip(self.layers, kv_cache, strict=False):
            x = layer(x, rotations, layer_cache, layout, self.arithmetic)
        return x, self.head.normed(x)

    def mtp_input(self, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        """The side of the last norm that the MTP module is fed with."""
        if self.mtp is None or self.mtp.contract.target_hidden is Hidden.AFTER_NORM:
            return after
        return before


def rotations_of(rope: Rope, arithmetic: Arithmetic, layout: BatchLayout) -> torch.Tensor:
    """Rotary factors [T, r/2] of every row."""

    def turn(positions: torch.Tensor) -> Rows:
        return (rope.rotations(positions),)

    return arithmetic.by_rows(turn, layout.positions)[0]
