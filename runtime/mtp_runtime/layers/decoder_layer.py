"""One decoder layer: attention and feed-forward, each after a norm, or before one, and added to the
stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from mtp_runtime.cache import CacheSpec, LayerCache
from mtp_runtime.layers.attention import Attention, ForwardPass
from mtp_runtime.layers.norm import RmsNorm


class FeedForward(Protocol):
    """The part of a decoder layer that takes every row by itself."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Transform rows x [T, d], which passed the norm, to [T, d]."""


@dataclass(frozen=True)
class Nothing(Attention):
    """Half of a layer that has the other one alone, in the place of attention or of the
    feed-forward: it adds nothing to the stream."""

    @property
    def row_elements(self) -> int:
        """Nothing is computed."""
        return 0

    def new_cache(self, spec: CacheSpec) -> LayerCache:
        """Nothing is kept."""
        return ()

    def __call__(
        self, x: torch.Tensor, cache: LayerCache = (), forward: ForwardPass | None = None
    ) -> torch.Tensor:
        """Return zeros for rows x [T, d]."""
        return torch.zeros_like(x)


@dataclass(frozen=True)
class DecoderLayer:
    """Pre-norm decoder layer of any attention and any feed-forward, either of which may be Nothing.

    input_norm: None where attention is given rows [T, w] of their own beside the stream.
    """

    input_norm: RmsNorm | None
    attention: Attention
    post_norm: RmsNorm
    feed_forward: FeedForward

    def new_cache(self, spec: CacheSpec) -> LayerCache:
        """Make the cache that the attention keeps."""
        return self.attention.new_cache(spec)

    def __call__(
        self,
        x: torch.Tensor,
        cache: LayerCache,
        forward: ForwardPass,
        attention_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Take rows x [T, d] through the layer; fills their cache entries. attention_input [T, w]:
        what attention takes where there is no input norm."""
        return self.fed_forward(self.attend(x, cache, forward, attention_input))

    def attend(
        self,
        x: torch.Tensor,
        cache: LayerCache,
        forward: ForwardPass,
        attention_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Take rows x [T, d] through the first half alone."""
        taken = self.normed(x) if attention_input is None else attention_input
        return self.with_attended(x, self.attention(taken, cache, forward))

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        """Return what attention takes of rows x [T, d]."""
        assert self.input_norm is not None, "rows are given to a layer without one"
        return self.input_norm(x)

    def with_attended(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Return rows x [T, d] with what attention made of them [T, d]."""
        return x + attended

    def fed_forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take rows x [T, d] through the second half alone."""
        return x + self.added(x)

    def added(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the second half adds to rows x [T, d]."""
        return self.feed_forward(self.fed(x))

    def fed(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the feed-forward takes of rows x [T, d]."""
        return self.post_norm(x)


@dataclass(frozen=True)
class PostNormLayer(DecoderLayer):
    """Decoder layer whose norms follow its parts: input_norm that of attention, post_norm that of
    the feed-forward.

    Source: transformers' exaone4.
    """

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        """Return rows x [T, d], which attention takes as they are."""
        return x

    def with_attended(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Return rows x [T, d] with the norm of what attention made of them [T, d]."""
        assert self.input_norm is not None, "every such layer has both norms"
        return x + self.input_norm(attended)

    def added(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the second half adds to rows x [T, d]."""
        return self.post_norm(self.feed_forward(x))

    def fed(self, x: torch.Tensor) -> torch.Tensor:
        """Return rows x [T, d], which the feed-forward takes as they are."""
        return x
