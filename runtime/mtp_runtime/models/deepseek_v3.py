"""DeepSeek-V3 and its MTP module: hidden states and logits at every row of a ragged batch.

Source: DeepSeek-V3 technical report, sections 2.1 and 2.2; the released weights concatenate
[embedding, hidden], the other way round than the report prints it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch
import torch.nn.functional as F

from mtp_kernels.batch_layout import BatchLayout
from mtp_runtime.config import Hidden, ModelConfig, MtpContract
from mtp_runtime.layers.attention import attend
from mtp_runtime.layers.linear import Linear
from mtp_runtime.layers.mla import Mla
from mtp_runtime.layers.moe import Mlp, Moe
from mtp_runtime.layers.norm import RmsNorm
from mtp_runtime.layers.rope import Rope

RowStep = Callable[[torch.Tensor], torch.Tensor]  # of every row by itself


class Layers(Protocol):
    """Some decoder layers in a row, however they are run."""

    def __len__(self) -> int: ...

    def __call__(
        self,
        x: torch.Tensor,  # [T, d]; may be overwritten
        kv_cache: torch.Tensor,  # [layers, pages, page, c+r]
        layout: BatchLayout,
    ) -> torch.Tensor: ...

    def each(self) -> Iterator[Layers]:
        """Every layer by itself."""


class Execution(Protocol):
    """What runs a model's parts: torch, or compiled kernels that are made of them."""

    def layers(self, layers: Iterable[DecoderLayer]) -> Layers: ...

    def norm(self, norm: RmsNorm) -> RowStep: ...

    def linear(self, linear: Linear) -> RowStep: ...

    def recursion(self, module: MtpModule) -> Recursion | None:
        """What drafts all tokens of a recursion in one call; None: they go step by step."""


class Recursion(Protocol):
    """Best drafts of an MTP module, each from the one before."""

    def __call__(
        self,
        x: torch.Tensor,  # [b, d], the module's output; overwritten
        starts: Sequence[int],  # positions of x
        counts: Sequence[int],  # tokens to draft, at least 1, the most first
        page_table: torch.Tensor,  # [b, max_pages]
        kv_cache: torch.Tensor,  # [1, pages, page, c+r]
    ) -> list[list[int]]: ...


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
        backend: str,  # of verify_attention
    ) -> torch.Tensor:
        mla = self.attention
        q_latent, q_rope, cached = mla.project(self.input_norm(x), rotations)
        kv_cache.flatten(0, 1).index_copy_(0, layout.slots, cached)
        x = x + mla.finish(attend(q_latent, q_rope, kv_cache, layout, mla.scale, backend))
        return x + self.feed_forward(self.post_norm(x))


@dataclass(frozen=True)
class TorchLayers:
    """Layers run by torch, operation by operation, on any device and in any dtype."""

    layers: tuple[DecoderLayer, ...]
    rope: Rope
    backend: str = "auto"

    def __len__(self) -> int:
        return len(self.layers)

    def __call__(
        self, x: torch.Tensor, kv_cache: torch.Tensor, layout: BatchLayout
    ) -> torch.Tensor:
        rotations = self.rope.rotations(layout.positions)
        for layer, layer_cache in zip(self.layers, kv_cache.unbind(), strict=False):
            x = layer(x, rotations, layer_cache, layout, self.backend)
        return x

    def each(self) -> Iterator[Layers]:
        return (replace(self, layers=(layer,)) for layer in self.layers)


@dataclass(frozen=True)
class TorchExecution:
    """Every operation by torch."""

    rope: Rope

    def layers(self, layers: Iterable[DecoderLayer]) -> Layers:
        return TorchLayers(tuple(layers), self.rope)

    def norm(self, norm: RmsNorm) -> RowStep:
        return norm

    def linear(self, linear: Linear) -> RowStep:
        return linear

    def recursion(self, module: MtpModule) -> None:
        return None


@dataclass(frozen=True)
class Head:
    """The last norm and the projection to the vocabulary."""

    norm: RmsNorm
    linear: Linear
    execution: Execution

    @cached_property
    def normed(self) -> RowStep:
        """The norm of rows [T, d]."""
        return self.execution.norm(self.norm)

    @cached_property
    def projected(self) -> RowStep:
        """The projection of rows [T, d] that passed the norm."""
        return self.execution.linear(self.linear)

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """float32 logits [T, vocab] of rows that passed the norm."""
        return self.projected(normed).float()


@dataclass(frozen=True)
class MtpModule:
    """The MTP layer: the next token's embedding and a hidden state in, the token after it out."""

    embedding: torch.Tensor
    embedding_norm: RmsNorm
    hidden_norm: RmsNorm
    projection: Linear
    layer: DecoderLayer
    head: Head
    contract: MtpContract
    execution: Execution

    @cached_property
    def layers(self) -> Layers:
        return self.execution.layers([self.layer])

    @cached_property
    def inputs(self) -> tuple[RowStep, RowStep, RowStep]:
        """The norms of embeddings and of hidden states, and what joins both."""
        own = self.execution
        return (
            own.norm(self.embedding_norm),
            own.norm(self.hidden_norm),
            own.linear(self.projection),
        )

    def __call__(
        self,
        next_tokens: torch.Tensor,  # [T]
        hidden: torch.Tensor,  # [T, d]
        kv_cache: torch.Tensor,  # [1, pages, page, c+r]
        layout: BatchLayout,
    ) -> torch.Tensor:
        """Rows at position i take token i+1 and hidden state i; returns [T, d] before the norm."""
        embedded = F.embedding(next_tokens, self.embedding)
        if self.contract.zero_first_embedding:
            embedded = embedded.masked_fill((layout.positions == 0)[:, None], 0.0)
        norm_embedding, norm_hidden, project = self.inputs
        both = torch.cat([norm_embedding(embedded), norm_hidden(hidden)], dim=-1)
        return self.layers(project(both), kv_cache, layout)

    @cached_property
    def recursion(self) -> Recursion | None:
        """What drafts the best tokens by recursion in one call, or None."""
        return self.execution.recursion(self)

    def recycled(self, x: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        """What the next draft of a recursion takes as hidden state."""
        return normed if self.contract.recycled_hidden is Hidden.AFTER_NORM else x


@dataclass(frozen=True)
class DeepseekV3:
    """The main model, and the MTP module where the checkpoint has one."""

    config: ModelConfig
    embedding: torch.Tensor
    layers: Layers
    head: Head
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
        kv_cache: torch.Tensor,  # [layers, pages, page, c+r]
        layout: BatchLayout,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states [T, d] of every row, before and after the last norm; fills the cache."""
        x = self.layers(F.embedding(tokens, self.embedding), kv_cache, layout)
        return x, self.head.normed(x)

    def mtp_input(self, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        """The side of the last norm that the MTP module is fed with."""
        if self.mtp is None or self.mtp.contract.target_hidden is Hidden.AFTER_NORM:
            return after
        return before
