"""Grouped-query attention whose keys and values may be those of another layer.

Source: transformers' gemma4.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mtp_checkpoints.errors import UnsupportedError
from mtp_runtime.cache import CacheSpec, LayerCache
from mtp_runtime.layers.attention import Expanded, ForwardPass
from mtp_runtime.layers.gqa import Gqa, in_window
from mtp_runtime.layers.norm import RmsNorm
from mtp_runtime.layers.rope import rotate_halves


@dataclass(frozen=True)
class SharedGqa(Gqa):
    """Grouped-query attention with norms of queries, keys and values, and scores as they are.

    qkv maps x to [queries | keys | values] of heads; values that have no projection are the keys
    before their norm. A token attends to `window` tokens, itself and those before it, None: to all.
    keeps: the name by which other layers find this one's keys and values, "" where none does.
    reads: the name of those that it takes, "" for its own; qkv then maps to queries alone.
    """

    value_norm: RmsNorm
    window: int | None
    keeps: str
    reads: str

    @property
    def scale(self) -> float:
        """Factor on attention scores."""
        return 1.0

    def new_cache(self, spec: CacheSpec) -> LayerCache:
        """Make the cache of keys and values; none for those of another layer."""
        return () if self.reads else super().new_cache(spec)

    def cached(
        self, heads: torch.Tensor, cache: LayerCache, forward: ForwardPass
    ) -> tuple[torch.Tensor, LayerCache]:
        """Return the queries [T, h, n] and the cache that they attend to, with the rows' own keys
        and values written where they are not another layer's."""
        query, key, value = self.split(heads, forward.cos_sin(self.rope))
        if self.reads:
            return query, forward.kept[self.reads]
        if self.keeps:
            forward.kept[self.keeps] = cache
        return query, self.written(cache, forward.layout.slots, key, value)

    def split(
        self, heads: torch.Tensor, cos_sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries [T, h, n], keys and values [T, g, n], normed, the first two rotated, of
        all heads; no keys and values of a layer that reads others'."""
        assert self.query_norm is not None and self.key_norm is not None, "as it is loaded"
        own = heads[:, self.sizes.heads :]
        key, value = own[:, : self.sizes.kv_heads], own[:, -self.sizes.kv_heads :]
        query, key = self.query_norm(self.queries(heads)), self.key_norm(key)
        query, key = (rotate_halves(each, cos_sin[:, None]) for each in (query, key))
        return query, key, self.value_norm(value)

    def seen(self, tokens: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
        """Return which tokens queries attend to, [s, t]: those in their windows."""
        if self.window is None:
            return super().seen(tokens, queries)
        return in_window(tokens, queries, self.window)

    def expanded(self, x: torch.Tensor, cos_sin: torch.Tensor) -> Expanded:
        """Refuse to be trained."""
        raise UnsupportedError(
            "Layers that share keys and values are not trained",
            expected="attention to keys and values of its own",
            found="attention as Gemma-4 has it",
        )
