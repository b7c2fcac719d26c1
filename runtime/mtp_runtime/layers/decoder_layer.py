"""One decoder layer: attention and feed-forward, each after a norm and added to the stream."""

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
class DecoderLayer:
    """Pre-norm decoder layer of any attention and any feed-forward.

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
        return x + self.attention(
            self.normed(x) if attention_input is None else attention_input, cache, forward
        )

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        """Return what attention takes of rows x [T, d]."""
        assert self.input_norm is not None, "rows are given to a layer without one"
        return self.input_norm(x)

    def fed_forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take rows x [T, d] through the second half alone."""
        return x + self.feed_forward(self.post_norm(x))
