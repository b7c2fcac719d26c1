"""Decoder layer with a norm before and after each part, and embeddings per layer beside the stream.

Source: transformers' gemma4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from mtp_runtime.cache import LayerCache
from mtp_runtime.layers.attention import ForwardPass
from mtp_runtime.layers.decoder_layer import DecoderLayer
from mtp_runtime.layers.embedding import Embedding
from mtp_runtime.layers.linear import Linear
from mtp_runtime.layers.norm import RmsNorm
from mtp_runtime.layers.normed_moe import MlpBeside


@dataclass(frozen=True)
class PerLayerEmbeddings:
    """Embeddings of tokens for every layer: those of a table [vocab, layers * p], and a projection
    of the stream's, each with a share of 1/sqrt(2)."""

    table: Embedding
    projection: Linear
    norm: RmsNorm

    def __call__(self, tokens: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Return the embeddings [T, layers, p] of tokens [T], given the stream's [T, d]."""
        size = len(self.norm.weight)
        projected = self.projection(embedded) * embedded.shape[1] ** -0.5
        of_stream, of_table = (
            each.view(len(tokens), -1, size) for each in (projected, self.table(tokens))
        )
        return (self.norm(of_stream) + of_table) * math.sqrt(0.5)


@dataclass(frozen=True)
class PerLayerInput:
    """Part of a layer that adds its embeddings, the index-th of each row's, to the stream."""

    index: int
    gate: Linear
    projection: Linear
    norm: RmsNorm

    def added(self, x: torch.Tensor, per_layer: torch.Tensor) -> torch.Tensor:
        """Return what is added to rows x [T, d], given the embeddings [T, layers, p]."""
        gated = F.gelu(self.gate(x), approximate="tanh") * per_layer[:, self.index]
        return self.norm(self.projection(gated))


@dataclass(frozen=True)
class SandwichLayer(DecoderLayer):
    """Decoder layer whose four norms surround its parts: input_norm and attention_norm attention,
    post_norm and output_norm the feed-forward. What leaves it is multiplied by scale [1]. beside:
    the MLP beside a mixture of experts, which takes rows as they come."""

    attention_norm: RmsNorm
    output_norm: RmsNorm
    scale: torch.Tensor
    inputs: PerLayerInput | None
    beside: MlpBeside | None = None

    def __call__(
        self,
        x: torch.Tensor,
        cache: LayerCache,
        forward: ForwardPass,
        attention_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Take rows x [T, d] through the layer, as others do."""
        x = super().__call__(x, cache, forward, attention_input)
        if self.inputs is not None:
            assert forward.per_layer is not None, "a pass of a model with such embeddings"
            x = x + self.inputs.added(x, forward.per_layer)
        return x * self.scale

    def with_attended(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Return rows x [T, d] with the norm of what attention made of them [T, d]."""
        return x + self.attention_norm(attended)

    def added(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the second half adds to rows x [T, d]."""
        if self.beside is None:
            return self.output_norm(super().added(x))
        return self.output_norm(self.beside(self.fed(x)) + self.feed_forward(x))
