"""Decoder layers in plain torch, float32, one request after the other: the definition of correct.

Source: DeepSeek-V2 report (arXiv 2405.04434), section 2.1; DeepSeek-V3 report (arXiv 2412.19437),
sections 2.1.2 and 2.2. Cached latents are expanded to keys and values of every head as the reports
write it, not absorbed into queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from mtp_kernels.batch_layout import BatchLayout
from mtp_kernels.decoder.checks import (
    check_config,
    check_layers,
    check_pass,
    check_recursion,
    check_weights,
)
from mtp_kernels.decoder.interface import (
    DecoderConfig,
    LayerKind,
    LayerWeights,
    RecursionParts,
    RowStep,
    Shapes,
)

# Fields of LayerWeights that are kept in a backend's dtype.
MATRICES = ("down", "query_up", "key_up", "value_up", "output", "gate", "up", "expert_down")


class Backend:
    """Keeps the given tensors as they are, matrices rounded to a dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def runs(self, kind: LayerKind) -> bool:
        """Return True for latent attention with a dense or mixture-of-experts MLP."""
        return kind.attention == "mla" and kind.feed_forward in ("dense", "sigmoid_moe")

    def pack(self, weights: LayerWeights) -> KeptLayer:
        """Keep a layer's weights."""
        check_weights(weights)
        matrices: dict[str, Any] = {
            name: self._rounded(getattr(weights, name)) for name in MATRICES
        }
        return KeptLayer(replace(weights, **matrices))

    def decoder(
        self,
        config: DecoderConfig,
        layers: Sequence[KeptLayer],
        *,
        inv_freq: torch.Tensor,
        attention_scaling: float,
    ) -> Decoder:
        """Join layers."""
        check_config(config, inv_freq)
        check_layers(config, layers)
        weights = tuple(layer.weights for layer in layers)
        return Decoder(config, weights, Rope(inv_freq, attention_scaling))

    def norm(self, weight: torch.Tensor, eps: float) -> RowStep:
        """Return an RMS norm."""
        return lambda x: rms_norm(x, weight, eps)

    def projection(self, matrix: torch.Tensor) -> RowStep:
        """Return a product."""
        rounded = matrix.to(self._dtype).float()
        return lambda x: x @ rounded.T

    def recursion(self, parts: RecursionParts) -> Recursion:
        """Return the recursion."""
        return Recursion(parts)

    def _rounded(self, matrix: torch.Tensor | None) -> torch.Tensor | None:
        return None if matrix is None else matrix.to(self._dtype).float()


@dataclass(frozen=True)
class KeptLayer:
    """A layer's weights as they were given."""

    weights: LayerWeights

    @property
    def shapes(self) -> Shapes:
        return self.weights.shapes()


@dataclass(frozen=True)
class Rope:
    """Rotation of neighbouring pairs by position."""

    inv_freq: torch.Tensor  # [r/2], radians per position
    attention_scaling: float

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotate x [T, h, r] of positions [T], times attention_scaling."""
        angles = positions.float()[:, None, None] * self.inv_freq  # [T, 1, r/2]
        cos, sin = angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)


@dataclass(frozen=True)
class Decoder:
    """Layers that are run operation by operation."""

    config: DecoderConfig
    layers: tuple[LayerWeights, ...]
    rope: Rope

    def __len__(self) -> int:
        return len(self.layers)

    def __call__(self, x: torch.Tensor, layout: BatchLayout, kv_cache: torch.Tensor) -> None:
        check_pass(self.config, len(self), x=x, layout=layout, kv_cache=kv_cache)
        for layer, cache in zip(self.layers, kv_cache, strict=False):
            x += self._attention(layer, rms_norm(x, layer.input_norm, self._eps), layout, cache)
            x += feed_forward(self.config, layer, rms_norm(x, layer.post_norm, self._eps))

    def part(self, first: int, stop: int) -> Decoder:
        return replace(self, layers=self.layers[first:stop])

    @property
    def _eps(self) -> float:
        return self.config.norm_eps

    def _attention(
        self, layer: LayerWeights, x: torch.Tensor, layout: BatchLayout, cache: torch.Tensor
    ) -> torch.Tensor:
        """Fill the layer's cache [pages, page, c+r] and return attention of normed x [T, d]."""
        sizes, rows = self.config, len(x)
        query_size = sizes.query_rank or sizes.heads * (sizes.nope + sizes.rope)
        query, latent, rope_key = torch.split(
            x @ layer.down.T, [query_size, sizes.latent, sizes.rope], dim=-1
        )
        if layer.query_up is not None and layer.query_norm is not None:
            rank = rms_norm(query, layer.query_norm, self._eps)
            query = torch.einsum("sq,hmq->shm", rank, layer.query_up)
        query = query.reshape(rows, sizes.heads, sizes.nope + sizes.rope)
        q_nope, q_rope = torch.split(query, [sizes.nope, sizes.rope], dim=-1)
        q_rope = self.rope.rotate(q_rope, layout.positions)
        latent = rms_norm(latent, layer.latent_norm, self._eps)
        rope_key = self.rope.rotate(rope_key[:, None], layout.positions)[:, 0]
        cache.flatten(0, 1)[layout.slots] = torch.cat([latent, rope_key], dim=-1)
        values = attend(self.config, layer, queries=(q_nope, q_rope), layout=layout, cache=cache)
        return values.flatten(1) @ layer.output.T


def attend(
    config: DecoderConfig,
    layer: LayerWeights,
    queries: tuple[torch.Tensor, torch.Tensor],  # [T, h, n] and [T, h, r]
    layout: BatchLayout,
    cache: torch.Tensor,  # [pages, page, c+r]
) -> torch.Tensor:
    """Return values [T, h, v]; a row that sees no token gets 0."""
    q_nope, q_rope = queries
    out = torch.zeros(len(q_nope), config.heads, config.value)
    starts, page = layout.cu_q.tolist(), cache.shape[1]
    for request, kv_len in enumerate(layout.kv_lens.tolist()):
        pages = layout.page_table[request, : -(-kv_len // page)].long()
        tokens = cache[pages].flatten(0, 1)[:kv_len]
        latents, rope_keys = tokens[:, : config.latent], tokens[:, config.latent :]
        keys = torch.einsum("tc,hcn->thn", latents, layer.key_up)
        values = torch.einsum("tc,hvc->thv", latents, layer.value_up)
        start, end = starts[request], starts[request + 1]
        for row in range(start, end):
            seen = kv_len - (end - 1 - row)
            if seen < 1:
                continue
            scores = torch.einsum("hn,thn->ht", q_nope[row], keys[:seen])
            scores += torch.einsum("hr,tr->ht", q_rope[row], rope_keys[:seen])
            probs = torch.softmax(scores * config.softmax_scale, dim=-1)
            out[row] = torch.einsum("ht,thv->hv", probs, values[:seen])
    return out


def feed_forward(config: DecoderConfig, layer: LayerWeights, x: torch.Tensor) -> torch.Tensor:
    """Return the MLP of normed rows x [T, d]: picked experts by weight, then the shared ones."""
    out, routed = torch.zeros_like(x), 0
    if layer.router is not None and layer.router_bias is not None:
        routed = len(layer.router)
        scores = torch.sigmoid(x @ layer.router.T)
        for row, (own, biased) in enumerate(zip(scores, scores + layer.router_bias, strict=True)):
            experts = picked_experts(config, biased)
            weights = own[experts]
            if config.normalise_weights:
                weights = weights / weights.sum()
            for expert, weight in zip(experts.tolist(), weights, strict=True):
                out[row] += weight * config.routed_scale * gated_mlp(layer, expert, x[row])
    for shared in range(routed, len(layer.gate)):
        out += gated_mlp(layer, shared, x)
    return out


def picked_experts(config: DecoderConfig, scores: torch.Tensor) -> torch.Tensor:
    """Return the best experts [k] of one row's biased scores [e], the lower of equals first.

    Only the best groups' experts count; a group is as good as the sum of its two best experts.
    """
    groups, kept = config.expert_groups, config.groups_per_token
    if kept < groups:
        grouped = scores.view(groups, -1)
        best_two = grouped.sort(dim=-1, descending=True)[0][:, :2].sum(dim=-1)
        left_out = best_two.argsort(descending=True, stable=True)[kept:]
        scores = grouped.index_fill(0, left_out, -torch.inf).flatten()
    return scores.argsort(descending=True, stable=True)[: config.experts_per_token]


def gated_mlp(layer: LayerWeights, expert: int, x: torch.Tensor) -> torch.Tensor:
    """Return down(silu(gate(x)) * up(x)) of one expert."""
    inner = F.silu(x @ layer.gate[expert].T) * (x @ layer.up[expert].T)
    return inner @ layer.expert_down[expert].T


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension."""
    return x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + eps) * weight


@dataclass(frozen=True)
class Recursion:
    """Drafts of one request after the other."""

    parts: RecursionParts

    def __call__(
        self,
        x: torch.Tensor,
        starts: Sequence[int],
        counts: Sequence[int],
        page_table: torch.Tensor,
        kv_cache: torch.Tensor,
    ) -> list[list[int]]:
        spans = (starts, counts)
        check_recursion(
            self.parts.decoder.config, x, spans=spans, page_table=page_table, kv_cache=kv_cache
        )
        return [
            self._drafts(row[None], start, count, (pages[None], kv_cache))
            for row, start, count, pages in zip(x, starts, counts, page_table, strict=True)
        ]

    def _drafts(
        self, hidden: torch.Tensor, start: int, count: int, cache: tuple[torch.Tensor, torch.Tensor]
    ) -> list[int]:
        """Return `count` tokens that follow one module output [1, d]."""
        parts, (page_table, kv_cache) = self.parts, cache
        drafts: list[int] = []
        while True:
            normed = parts.head_norm(hidden)
            logits = parts.head(normed)[0]
            drafts.append(int((logits == logits.max()).nonzero()[0]))
            if len(drafts) == count:
                return drafts
            source = normed if parts.recycles_normed else hidden
            token = parts.embedding[drafts[-1]][None]
            joined = torch.cat([parts.embedding_norm(token), parts.hidden_norm(source)], dim=-1)
            hidden = parts.projection(joined).contiguous()
            layout = one_row(start + len(drafts), page_table, kv_cache.shape[2])
            parts.decoder(hidden, layout, kv_cache)


def one_row(position: int, page_table: torch.Tensor, page: int) -> BatchLayout:
    """Return the layout of a single row, which sees everything up to its position."""
    slot = int(page_table[0, position // page]) * page + position % page
    return BatchLayout(
        positions=torch.tensor([position]),
        slots=torch.tensor([slot]),
        page_table=page_table.contiguous(),
        kv_lens=torch.tensor([position + 1], dtype=torch.int32),
        cu_q=torch.tensor([0, 1], dtype=torch.int32),
    )
