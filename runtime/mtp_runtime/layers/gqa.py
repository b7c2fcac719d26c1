"""Grouped-query attention: several query heads share a key and a value, both cached per token.

Source: Ainslie et al., GQA (arXiv 2305.13245).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from mtp_checkpoints.errors import UnsupportedError
from mtp_kernels.sizes import GroupedSizes
from mtp_runtime.cache import CacheSpec, LayerCache
from mtp_runtime.layers.attention import Attention, Expanded, ForwardPass
from mtp_runtime.layers.linear import Linear
from mtp_runtime.layers.norm import RmsNorm
from mtp_runtime.layers.rope import Rope, rotate_halves


@dataclass(frozen=True)
class Gqa(Attention):
    """Projections around torch's attention; the cache is keys and values [pages, page, g, n], g
    being the key heads.

    qkv maps x to [queries | keys | values], heads of one size n; bias [h*n + 2*g*n] is added where
    there is one. The first elements of a head are rotated, a pair being an element of either half.
    """

    qkv: Linear
    bias: torch.Tensor | None
    query_norm: RmsNorm | None
    key_norm: RmsNorm | None
    output: Linear
    rope: Rope
    sizes: GroupedSizes

    @property
    def scale(self) -> float:
        """Factor on attention scores."""
        return float(self.sizes.head**-0.5)

    @property
    def row_elements(self) -> int:
        """Elements of queries, what they attended to, and a copy of it, [h, n] each."""
        return 3 * self.sizes.heads * self.sizes.head

    def new_cache(self, spec: CacheSpec) -> LayerCache:
        """Make the cache of keys and values."""
        return spec.empty(self.sizes.kv_heads, self.sizes.head), spec.empty(
            self.sizes.kv_heads, self.sizes.head
        )

    def __call__(self, x: torch.Tensor, cache: LayerCache, forward: ForwardPass) -> torch.Tensor:
        """Attend from rows x [T, d] to the cached keys; returns [T, d]."""
        layout, heads = forward.layout, self.heads_of(x)
        query, (keys, values) = self.cached(heads, cache, forward)
        attended = torch.empty_like(query)
        attend = _attend_plainly if forward.backend == "reference" else _attend
        ends = layout.cu_q.tolist()
        for request, length in enumerate(layout.kv_lens.tolist()):
            rows = slice(ends[request], ends[request + 1])
            pages = layout.page_table[request, : -(-length // keys.shape[1])]
            seen = self.seen(torch.arange(length, device=x.device), layout.positions[rows, None])
            key, value = (_cached(each, pages, length) for each in (keys, values))
            attended[rows] = attend(query[rows], key, value, seen, scale=self.scale)
        gates = self.gates_of(heads, x)
        return self.output((attended if gates is None else attended * gates).flatten(1))

    def cached(
        self, heads: torch.Tensor, cache: LayerCache, forward: ForwardPass
    ) -> tuple[torch.Tensor, LayerCache]:
        """Write keys and values of the rows, among all that was projected of them, into the cache;
        return the queries [T, h, n], and the cache that they attend to."""
        query, key, value = self.split(heads, forward.cos_sin(self.rope))
        return query, self.written(cache, forward.layout.slots, key, value)

    def written(
        self, cache: LayerCache, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> LayerCache:
        """Return the cache with keys and values [T, g, n] of rows in their slots [T]."""
        for entries, own in zip(cache, (key, value), strict=True):
            entries.flatten(0, 1).index_copy_(0, slots, own)
        return cache

    def seen(self, tokens: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
        """Return which tokens, of positions [t], queries of positions [s, 1] attend to: [s, t]."""
        return tokens <= queries

    def heads_of(self, x: torch.Tensor) -> torch.Tensor:
        """Project x [T, d] to queries, with their gates where there are some, keys and values of
        all heads [T, queries + 2g, n]."""
        projected = self.qkv(x)
        if self.bias is not None:
            projected = projected + self.bias
        return projected.view(len(x), -1, self.sizes.head)

    def gates_of(self, heads: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
        """Return what multiplies that which heads attend to, [T, h, n] or [T, h, 1], given all that
        was projected of x [T, d]; None for heads without gates."""
        return None

    def queries(self, heads: torch.Tensor) -> torch.Tensor:
        """Return the queries [T, h, n] among all heads."""
        return heads[:, : self.sizes.heads]

    def split(
        self, heads: torch.Tensor, cos_sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries [T, h, n], keys and values [T, g, n], normed and rotated, of all heads."""
        query = self.queries(heads)
        key, value = heads[:, self.sizes.queries :].chunk(2, dim=1)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        query, key = (rotate_halves(each, cos_sin[:, None]) for each in (query, key))
        return query, key, value

    def expanded(self, x: torch.Tensor, cos_sin: torch.Tensor) -> Expanded:
        """Project x [T, d] to scaled queries [T, h, n] and, for every one of them, keys and
        values [T, h, n], and its gate."""
        heads = self.heads_of(x)
        query, key, value = self.split(heads, cos_sin)
        each = self.sizes.heads // self.sizes.kv_heads
        key, value = (tensor.repeat_interleave(each, dim=1) for tensor in (key, value))
        return Expanded(query * self.scale, key, value, self.gates_of(heads, x))


@dataclass(frozen=True)
class GatedGqa(Gqa):
    """Grouped-query attention whose heads are gated: qkv maps x to [query | gate] of every head,
    then keys and values, and the sigmoid of its gate multiplies what a head attended to.

    Source: transformers' qwen3_next.
    """

    def queries(self, heads: torch.Tensor) -> torch.Tensor:
        """Return every other of the first heads."""
        return heads[:, : self.sizes.queries : 2]

    def gates_of(self, heads: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
        """Return the gates [T, h, n]: every other of the first heads, beside its query."""
        return heads[:, 1 : self.sizes.queries : 2].sigmoid()


@dataclass(frozen=True)
class SlidingGqa(Gqa):
    """Grouped-query attention of a token to `window` tokens, itself and those before it.

    Source: transformers' exaone_moe.
    """

    window: int

    def seen(self, tokens: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
        """Return which tokens queries attend to, [s, t]: those in their windows."""
        return in_window(tokens, queries, self.window)

    def expanded(self, x: torch.Tensor, cos_sin: torch.Tensor) -> Expanded:
        """Refuse to be trained: what trains attention knows no windows."""
        raise _with_window(self.window)


@dataclass(frozen=True)
class HeadGatedGqa(Gqa):
    """Grouped-query attention whose heads are gated: the sigmoid of its gate, one of gates(x)
    [T, h], multiplies what a head attended to. A token attends to `window` tokens, None: to all.

    Source: transformers' step3p7.
    """

    gates: Linear
    window: int | None

    def seen(self, tokens: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
        """Return which tokens queries attend to, [s, t]: those in their windows."""
        if self.window is None:
            return super().seen(tokens, queries)
        return in_window(tokens, queries, self.window)

    def gates_of(self, heads: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
        """Return one gate [T, h, 1] for every head."""
        return self.gates(x).sigmoid()[..., None]

    def expanded(self, x: torch.Tensor, cos_sin: torch.Tensor) -> Expanded:
        """Project x [T, d] as others do (UnsupportedError for layers with a window)."""
        if self.window is not None:
            raise _with_window(self.window)
        return super().expanded(x, cos_sin)


def _with_window(window: int) -> UnsupportedError:
    return UnsupportedError(
        "Layers with a sliding window are not trained",
        expected="attention to all tokens before a query",
        found=f"the last {window}",
        todo="Export the module as it is, or graft another one",
    )


def in_window(tokens: torch.Tensor, queries: torch.Tensor, window: int) -> torch.Tensor:
    """Return which tokens, of positions [t], are among the last `window` up to queries [s, 1]."""
    return (tokens <= queries) & (tokens > queries - window)


def _cached(entries: torch.Tensor, pages: torch.Tensor, length: int) -> torch.Tensor:
    """Gather the first entries [t, g, n] of a request from its pages."""
    return entries[pages].flatten(0, 1)[:length]


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor, *, scale: float
) -> torch.Tensor:
    """Attend from queries [s, h, n] to the keys [t, g, n] that each of them sees [s, t]; scale:
    factor on scores."""
    query, key, value = (each.transpose(0, 1)[None] for each in (query, key, value))  # [1, h, s, n]
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=seen, scale=scale, enable_gqa=True
    )
    return out[0].transpose(0, 1)


def _attend_plainly(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor, *, scale: float
) -> torch.Tensor:
    """Attend as _attend does, step by step in float64."""
    grouped = query.double().view(len(query), key.shape[1], -1, query.shape[2])  # [s, g, h/g, n]
    scores = torch.einsum("sgin,tgn->gist", grouped, key.double()) * scale
    weights = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
    return torch.einsum("gist,tgn->sgin", weights, value.double()).flatten(1, 2).to(query.dtype)
