"""Decoder layers in plain torch, float32, one request after the other: the definition of correct.

Source: DeepSeek-V2 report (arXiv 2405.04434), section 2.1; DeepSeek-V3 report (arXiv 2412.19437),
sections 2.1.2 and 2.2. Cached latents are expanded to keys and values of every head as the reports
write it, not absorbed into queries. Grouped queries: arXiv 2305.13245.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F

from mtp_kernels.batch_layout import BatchLayout, StateLayout
from mtp_kernels.cpu.memory import Arena
from mtp_kernels.decoder import (
    DecoderConfig,
    DeltaConfig,
    DeltaWeights,
    GroupedWeights,
    LatentWeights,
    LayerKind,
    LayerWeights,
    Matrix,
    RecursionParts,
    Rope,
    RowStep,
    pieces_of,
)
from mtp_kernels.decoder.checks import (
    check_config,
    check_delta_config,
    check_delta_pass,
    check_layers,
    check_parts,
    check_pass,
    check_recursion,
    check_weights,
)
from mtp_kernels.gated_delta import DeltaState, gated_delta
from mtp_kernels.sizes import GroupedSizes, LatentSizes, Shapes

# Weights that are kept in a backend's dtype.
MATRICES = ("down", "query_up", "key_up", "value_up", "qkv", "output", "gate_up", "expert_down",
            "inputs", "gate_inputs")  # fmt: skip
Weights = TypeVar("Weights", bound=LayerWeights | LatentWeights | GroupedWeights | DeltaWeights)


class Backend:
    """Keeps the given tensors as they are, matrices rounded to a dtype."""

    def __init__(
        self,
        dtype: torch.dtype,
        activations: torch.dtype = torch.float32,
        arena: Arena | None = None,
    ) -> None:
        assert activations is torch.float32
        self._dtype = dtype

    def runs(self, kind: LayerKind) -> bool:
        """Return True for latent or grouped-query attention, or a gated delta net, with a dense or
        mixture-of-experts MLP."""
        rows = kind.feed_forward in ("dense", "sigmoid_moe", "softmax_moe")
        return kind.attention in ("mla", "gqa", "gated_delta") and rows

    def pack(self, weights: LayerWeights) -> KeptLayer:
        """Keep a layer's weights."""
        check_weights(weights)
        rounded = self._rounded(weights)
        return KeptLayer(replace(rounded, attention=self._rounded(weights.attention)))

    def decoder(self, config: DecoderConfig, layers: Sequence[KeptLayer], rope: Rope) -> Decoder:
        """Join layers."""
        check_config(config, rope.inv_freq)
        check_layers(config, layers)
        return Decoder(config, tuple(layers), Rotation(rope.inv_freq, rope.attention_scaling))

    def delta_decoder(self, config: DeltaConfig, layers: Sequence[KeptLayer]) -> DeltaDecoder:
        """Join layers with gated delta nets."""
        check_delta_config(config)
        check_layers(config, layers)
        return DeltaDecoder(config, tuple(layers))

    def norm(self, weight: torch.Tensor, eps: float) -> RowStep:
        """Return an RMS norm."""
        return lambda x: rms_norm(x, weight, eps)

    def projection(self, matrix: Matrix) -> Projection:
        """Return a product."""
        return Projection(in_memory(matrix).to(self._dtype).float())

    def recursion(self, parts: RecursionParts) -> Recursion:
        """Return the recursion."""
        decoder = parts.decoder
        assert isinstance(decoder, Decoder), "parts of this backend"
        check_parts(decoder.config, decoder.layers[0], parts)
        return Recursion(parts)

    def _rounded(self, weights: Weights) -> Weights:
        """Return weights whose matrices are rounded to the backend's dtype."""
        names = {field.name for field in fields(weights)}.intersection(MATRICES)
        given = {name: getattr(weights, name) for name in names}
        rounded: dict[str, Any] = {
            name: in_memory(matrix).to(self._dtype).float()
            for name, matrix in given.items()
            if matrix is not None
        }
        return replace(weights, **rounded)


def in_memory(matrix: Matrix) -> torch.Tensor:
    """Return all rows of a matrix in its shape."""
    return torch.cat([*pieces_of(matrix)]).view(matrix.shape)


@dataclass(frozen=True)
class KeptLayer:
    """A layer's weights as they were given."""

    weights: LayerWeights

    @property
    def shapes(self) -> Shapes:
        return self.weights.shapes()


@dataclass(frozen=True)
class Projection:
    """Product with a matrix [out, in]."""

    matrix: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.matrix.T

    def best(self, x: torch.Tensor) -> torch.Tensor:
        rows = self(x)
        largest = rows == rows.max(dim=-1, keepdim=True).values
        return largest.int().argmax(dim=-1)  # the first


class Rotation(Rope):
    """Rotation of pairs by position."""

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotate neighbouring pairs of x [T, h, r] of positions [T], times attention_scaling."""
        cos, sin = self._cos_sin(positions)
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)

    def rotate_halves(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotate the first r entries of x [T, h, n], pairs being entries of either half."""
        cos, sin = self._cos_sin(positions)
        pairs = len(self.inv_freq)
        first, second, rest = torch.split(x, [pairs, pairs, x.shape[-1] - 2 * pairs], dim=-1)
        turned = first * cos - second * sin, first * sin + second * cos
        return torch.cat([*turned, rest], dim=-1)

    def _cos_sin(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = positions.float()[:, None, None] * self.inv_freq  # [T, 1, r/2]
        return angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling


@dataclass(frozen=True)
class Decoder:
    """Layers that are run operation by operation."""

    config: DecoderConfig
    layers: tuple[KeptLayer, ...]
    rope: Rotation

    def __len__(self) -> int:
        return len(self.layers)

    def __call__(
        self,
        x: torch.Tensor,
        layout: BatchLayout,
        kv_cache: torch.Tensor,
        attention_input: torch.Tensor | None = None,
    ) -> None:
        check_pass(
            self.config,
            self.layers,
            x=x,
            layout=layout,
            kv_cache=kv_cache,
            attention_input=attention_input,
        )
        for kept, cache in zip(self.layers, kv_cache, strict=False):
            layer = kept.weights
            if layer.input_norm is not None:
                attention_input = rms_norm(x, layer.input_norm, self._eps)
            assert attention_input is not None, "checked with the pass"
            x += self._attention(layer, attention_input, layout, cache)
            x += feed_forward(self.config, layer, rms_norm(x, layer.post_norm, self._eps))

    def part(self, first: int, stop: int) -> Decoder:
        return replace(self, layers=self.layers[first:stop])

    @property
    def _eps(self) -> float:
        return self.config.norm_eps

    def _attention(
        self, layer: LayerWeights, x: torch.Tensor, layout: BatchLayout, cache: torch.Tensor
    ) -> torch.Tensor:
        """Fill the layer's cache [pages, page, slot] and return attention of rows x [T, w]."""
        sizes, weights = self.config.attention, layer.attention
        if isinstance(sizes, GroupedSizes):
            assert isinstance(weights, GroupedWeights), "checked with the layers"
            query, entries, gates = self._grouped(sizes, weights, x, layout.positions)
        else:
            assert isinstance(weights, LatentWeights), "checked with the layers"
            (query, entries), gates = self._latent(sizes, weights, x, layout.positions), None
        cache.flatten(0, 1)[layout.slots] = entries
        values = attend(self.config, weights, query, layout=layout, cache=cache)
        if gates is not None:
            values = values * gates
        return values.flatten(1) @ weights.output.T

    def _latent(
        self, sizes: LatentSizes, weights: LatentWeights, x: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries [T, h, n+r] and cache entries [T, c+r]."""
        query, latent, rope_key = torch.split(
            x @ weights.down.T, [sizes.projected - sizes.slot, sizes.latent, sizes.rope], dim=-1
        )
        if weights.query_up is not None and weights.query_norm is not None:
            rank = rms_norm(query, weights.query_norm, self._eps)
            query = torch.einsum("sq,hmq->shm", rank, weights.query_up)
        query = query.reshape(len(x), sizes.heads, sizes.nope + sizes.rope)
        q_nope, q_rope = torch.split(query, [sizes.nope, sizes.rope], dim=-1)
        query = torch.cat([q_nope, self.rope.rotate(q_rope, positions)], dim=-1)
        latent = rms_norm(latent, weights.latent_norm, self._eps)
        rope_key = self.rope.rotate(rope_key[:, None], positions)[:, 0]
        return query, torch.cat([latent, rope_key], dim=-1)

    def _grouped(
        self,
        sizes: GroupedSizes,
        weights: GroupedWeights,
        x: torch.Tensor,
        positions: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return queries [T, h, n], cache entries [T, 2*g*n], and what values [T, h, n] are
        multiplied with, if anything."""
        projected, gates = x @ weights.qkv.T, None
        if weights.bias is not None:
            projected = projected + weights.bias
        counts = [sizes.queries, sizes.kv_heads, sizes.kv_heads]
        by_head = projected.view(len(x), sum(counts), sizes.head)
        query, key, value = torch.split(by_head, counts, dim=1)
        if sizes.is_gated:
            query, gates = query[:, ::2], torch.sigmoid(query[:, 1::2])
        if weights.query_norm is not None and weights.key_norm is not None:
            query = rms_norm(query, weights.query_norm, self._eps)
            key = rms_norm(key, weights.key_norm, self._eps)
        query, key = (self.rope.rotate_halves(one, positions) for one in (query, key))
        return query, torch.cat([key, value], dim=1).flatten(1), gates


@dataclass(frozen=True)
class DeltaDecoder:
    """Layers with gated delta nets that are run operation by operation."""

    config: DeltaConfig
    layers: tuple[KeptLayer, ...]

    def __len__(self) -> int:
        return len(self.layers)

    def __call__(self, x: torch.Tensor, layout: StateLayout, state: DeltaState) -> None:
        check_delta_pass(self.config, len(self), x, layout, state)
        pools = zip(state.states, state.inputs, state.gates, strict=True)
        for kept, pool in zip(self.layers, pools, strict=False):
            layer, eps = kept.weights, self.config.norm_eps
            assert isinstance(layer.attention, DeltaWeights) and layer.input_norm is not None
            normed = rms_norm(x, layer.input_norm, eps)
            x += self._net(layer.attention, normed, layout, DeltaState(*pool))
            x += feed_forward(self.config, layer, rms_norm(x, layer.post_norm, eps))

    def part(self, first: int, stop: int) -> DeltaDecoder:
        return replace(self, layers=self.layers[first:stop])

    def _net(
        self, weights: DeltaWeights, x: torch.Tensor, layout: StateLayout, state: DeltaState
    ) -> torch.Tensor:
        """Return a gated delta net of rows x [T, d], and advance the layer's state."""
        sizes = self.config.attention
        made, gates = x @ in_memory(weights.inputs).T, x @ in_memory(weights.gate_inputs).T
        rows, z = torch.split(made, [sizes.channels, sizes.output], dim=1)
        beta, decay = gates.chunk(2, dim=1)
        log_decay = weights.rate * F.softplus(decay + weights.decay_bias)
        read = gated_delta(
            rows.contiguous(),
            torch.stack([log_decay, beta.sigmoid()], dim=1),
            weights.convolution,
            state,
            layout,
            sizes,
            backend="reference",
        )
        normed = rms_norm(read, weights.value_norm, self.config.norm_eps).flatten(1)
        return (normed * F.silu(z)) @ in_memory(weights.output).T


def attend(
    config: DecoderConfig,
    weights: LatentWeights | GroupedWeights,
    query: torch.Tensor,  # [T, h, width of a key]
    layout: BatchLayout,
    cache: torch.Tensor,  # [pages, page, slot]
) -> torch.Tensor:
    """Return values [T, h, v]; a row that sees no token gets 0."""
    rows: list[torch.Tensor] = []
    starts, page = layout.cu_q.tolist(), cache.shape[1]
    for request, kv_len in enumerate(layout.kv_lens.tolist()):
        pages = layout.page_table[request, : -(-kv_len // page)].long()
        tokens = cache[pages].flatten(0, 1)[:kv_len]
        keys, values = expanded(config.attention, weights, tokens)
        start, end = starts[request], starts[request + 1]
        for row in range(start, end):
            seen = max(0, kv_len - (end - 1 - row))
            scores = torch.einsum("hn,thn->ht", query[row], keys[:seen])
            probs = torch.softmax(scores * config.softmax_scale, dim=-1)
            rows.append(torch.einsum("ht,thv->hv", probs, values[:seen]))
    return torch.stack(rows) if rows else query.new_zeros(0, 1, weights.output.shape[1])


def expanded(
    sizes: LatentSizes | GroupedSizes,
    weights: LatentWeights | GroupedWeights,
    tokens: torch.Tensor,  # [t, slot]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and values of every head, [t, h, width of a key] and [t, h, v]."""
    if isinstance(weights, LatentWeights):
        assert isinstance(sizes, LatentSizes), "checked with the layers"
        latents, rope_keys = tokens[:, : sizes.latent], tokens[:, sizes.latent :]
        keys = torch.einsum("tc,hnc->thn", latents, weights.key_up)
        rope_keys = rope_keys[:, None].expand(-1, sizes.heads, -1)
        return torch.cat([keys, rope_keys], dim=-1), torch.einsum(
            "tc,hvc->thv", latents, weights.value_up
        )
    assert isinstance(sizes, GroupedSizes), "checked with the layers"
    entries = tokens.view(len(tokens), 2, sizes.kv_heads, sizes.head)
    each = entries.repeat_interleave(sizes.heads // sizes.kv_heads, dim=2)
    return each[:, 0], each[:, 1]


def feed_forward(
    config: DecoderConfig | DeltaConfig, layer: LayerWeights, x: torch.Tensor
) -> torch.Tensor:
    """Return the MLP of normed rows x [T, d]: picked experts by weight, then the shared ones."""
    out, routed = torch.zeros_like(x), 0
    if layer.router is not None:
        routed, scores = len(layer.router), x @ layer.router.T
        scores = scores.softmax(-1) if config.has_softmax else torch.sigmoid(scores)
        for row, own in enumerate(scores):
            biased = own if layer.router_bias is None else own + layer.router_bias
            experts = picked_experts(config, biased)
            weights = own[experts]
            if config.routing.normalises:
                weights = weights / weights.sum()
            for expert, weight in zip(experts.tolist(), weights, strict=True):
                out[row] += weight * config.routing.scale * gated_mlp(layer, expert, x[row])
    weight = torch.ones(len(x), 1)
    if layer.shared_gate is not None:
        weight = torch.sigmoid(x @ layer.shared_gate)[:, None]
    for shared in range(routed, len(layer.gate_up)):
        out += weight * gated_mlp(layer, shared, x)
    return out


def picked_experts(config: DecoderConfig | DeltaConfig, scores: torch.Tensor) -> torch.Tensor:
    """Return the best experts [k] of one row's biased scores [e], the lower of equals first.

    Only the best groups' experts count; a group is as good as the sum of its two best experts.
    """
    picked, groups, kept, *_ = config.routing
    if kept < groups:
        grouped = scores.view(groups, -1)
        best_two = grouped.sort(dim=-1, descending=True)[0][:, :2].sum(dim=-1)
        left_out = best_two.argsort(descending=True, stable=True)[kept:]
        scores = grouped.index_fill(0, left_out, -torch.inf).flatten()
    return scores.argsort(descending=True, stable=True)[:picked]


def gated_mlp(layer: LayerWeights, expert: int, x: torch.Tensor) -> torch.Tensor:
    """Return down(silu(gate(x)) * up(x)) of one expert."""
    gate, up = (x @ layer.gate_up[expert].T).chunk(2, dim=-1)
    inner = F.silu(gate) * up
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
            drafts.append(int(parts.tokens[parts.head.best(normed)[0]]))
            if len(drafts) == count:
                return drafts
            source = normed if parts.recycles_normed else hidden
            token = parts.embedding[drafts[-1]][None].float()
            stream, attention_input = parts.inputs.joined(token, source)
            hidden = stream.clone(memory_format=torch.contiguous_format)  # overwritten by the layer
            layout = one_row(start + len(drafts), page_table, kv_cache.shape[2])
            parts.decoder(hidden, layout, kv_cache, attention_input)


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
