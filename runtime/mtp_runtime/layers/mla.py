"""Multi-head latent attention in its absorbed form: queries meet the cached latent directly, so
that a token takes c + r cached numbers whatever the number of heads.

Source: DeepSeek-V2 report (arXiv 2405.04434), section 2.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple

import torch

from mtp_checkpoints.errors import UnsupportedError
from mtp_kernels.decoder import Piece
from mtp_kernels.sizes import LatentSizes
from mtp_kernels.verify_attention import Sizes, check_sizes, has_split_cache
from mtp_runtime.cache import CacheSpec, LayerCache
from mtp_runtime.layers.attention import Attention, Expanded, ForwardPass
from mtp_runtime.layers.linear import Linear
from mtp_runtime.layers.norm import RmsNorm
from mtp_runtime.layers.operators import attend
from mtp_runtime.layers.rope import Rope, rotate_pairs


class Lowered(NamedTuple):
    """Rows projected down: the query (its normed low rank, where it has one), latent, rope key."""

    query: torch.Tensor
    latent: torch.Tensor
    rope_key: torch.Tensor


@dataclass(frozen=True)
class Halves:
    """The halves of kv_b_proj, which are absorbed: key_up [h, n, c] and value_up [h, c, v]."""

    key_up: torch.Tensor
    value_up: torch.Tensor

    @classmethod
    def of(cls, matrix: torch.Tensor, heads: int, nope: int) -> Halves:
        """Take the halves of kv_b_proj's weight [h*(n+v), c]."""
        by_head = matrix.view(heads, -1, matrix.shape[1])
        return cls(by_head[:, :nope].contiguous(), by_head[:, nope:].transpose(1, 2).contiguous())

    @property
    def dense(self) -> Halves:
        """These halves."""
        return self


@dataclass(frozen=True)
class StoredHalves:
    """The halves of kv_b_proj [h*(n+v), c], which stay in their files until compiled kernels pack
    them. Torch, where it runs the layer after all, expands them when they are first used."""

    linear: Linear
    heads: int
    nope: int

    def rows(self, *, of_values: bool) -> Iterator[Piece]:
        """Yield the rows [n, c] of each head's keys, or [v, c] of its values."""
        size = self.linear.weight.shape[0] // self.heads
        low, high = (self.nope, size) if of_values else (0, self.nope)
        at = 0
        for piece in self._pieces:
            end = at + len(piece)
            for head in range(at // size, -(-end // size)):
                first, last = max(head * size + low, at), min(head * size + high, end)
                if first < last:
                    yield piece[first - at : last - at]
            at = end

    @cached_property
    def dense(self) -> Halves:
        """Both halves in float32 (InvalidInputError when damaged)."""
        return Halves.of(self.linear.matrix(torch.float32).t(), self.heads, self.nope)

    @cached_property
    def _pieces(self) -> tuple[Piece, ...]:
        return tuple(self.linear.pieces())


@dataclass(frozen=True)
class Mla(Attention):
    """Projections around verify_attention; the cache is one tensor [pages, page, c+r], or on some
    devices two, latents and rope keys.

    down maps x to [query (or its low rank) | latent | rope key].
    """

    down: Linear
    query_norm: RmsNorm | None
    query_up: Linear | None
    latent_norm: RmsNorm
    up: Halves | StoredHalves
    output: Linear
    rope: Rope
    sizes: LatentSizes
    scale: float
    is_static: ClassVar[bool] = True

    @property
    def row_elements(self) -> int:
        """Elements of queries, attended latents and a copy of them, [h, c] each."""
        return 3 * self.sizes.heads * self.sizes.latent

    def new_cache(self, spec: CacheSpec) -> LayerCache:
        """Make the cache of latents and rope keys.

        Raises UnsupportedError where they are split and the device's attention does not take them.
        """
        latent, rope = self.sizes.latent, self.sizes.rope
        if not has_split_cache(spec.device):
            return (spec.empty(latent + rope),)
        self._check_device(spec)
        return spec.empty(latent), spec.empty(rope)

    def _check_device(self, spec: CacheSpec) -> None:
        sizes = Sizes(
            batch=1,
            queries=1,
            max_q_len=1,
            kv_tokens=spec.page_size,
            heads=self.sizes.heads,
            latent=self.sizes.latent,
            rope=self.sizes.rope,
            page=spec.page_size,
            dtype=spec.dtype,
            kv_dtype=spec.dtype,
        )
        try:
            check_sizes(sizes, spec.device)
        except ValueError as error:
            raise UnsupportedError(
                "The device's attention does not take this model or this size of pages",
                found=f"{spec.device}: {error}",
                todo="Use device cpu, or a block size within the limits",
            ) from error

    def __call__(self, x: torch.Tensor, cache: LayerCache, forward: ForwardPass) -> torch.Tensor:
        """Attend from rows x [T, d] to the cached latents; returns [T, d]."""
        layout = forward.layout
        q_latent, q_rope, cached = self.project(self.lower(x), forward.cos_sin(self.rope))
        widths = [tensor.shape[-1] for tensor in cache]
        for tensor, entries in zip(cache, torch.split(cached, widths, dim=1), strict=True):
            tensor.flatten(0, 1).index_copy_(0, layout.slots, entries)
        query = q_latent, q_rope.contiguous()
        attended = attend(query, cache, layout, scale=self.scale, backend=forward.backend)
        return self.finish(attended)

    def lower(self, x: torch.Tensor) -> Lowered:
        """Project x [T, d] down."""
        latent, rope = self.sizes.latent, self.sizes.rope
        projected = self.down(x)
        query_size = projected.shape[1] - latent - rope
        query, kv, k_rope = torch.split(projected, [query_size, latent, rope], dim=1)
        if self.query_norm is not None:
            query = self.query_norm(query)
        return Lowered(query, kv, k_rope)

    def project(
        self, lowered: Lowered, cos_sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return q_latent [T, h, c], q_rope [T, h, r] and cache entries [T, c+r]."""
        q_nope, latent, rotated = self._by_head(lowered, cos_sin)
        heads = self.sizes.heads
        q_latent = (
            torch.bmm(q_nope.transpose(0, 1), self.up.dense.key_up).transpose(0, 1).contiguous()
        )
        cached = torch.cat([latent, rotated[:, heads]], dim=1)
        return q_latent, rotated[:, :heads], cached

    def expanded(self, x: torch.Tensor, cos_sin: torch.Tensor) -> Expanded:
        """Project x [T, d] to scaled queries and keys [T, h, n+r] and values [T, h, v]."""
        q_nope, latent, rotated = self._by_head(self.lower(x), cos_sin)
        heads = self.sizes.heads
        query = torch.cat([q_nope, rotated[:, :heads]], dim=2) * self.scale
        key = torch.einsum("tc,hnc->thn", latent, self.up.dense.key_up)
        key = torch.cat([key, rotated[:, heads:].expand(-1, heads, -1)], dim=2)
        return Expanded(query, key, torch.einsum("tc,hcv->thv", latent, self.up.dense.value_up))

    def _by_head(
        self, lowered: Lowered, cos_sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return q_nope [T, h, n], normed latents [T, c], and the rotated parts of queries and,
        behind them, of the key [T, h+1, r]."""
        query, kv, k_rope = lowered
        heads, nope, rope = self.sizes.heads, self.sizes.nope, self.sizes.rope
        if self.query_up is not None:
            query = self.query_up(query)
        by_head = query.view(query.shape[0], heads, -1)
        q_nope, q_rope = torch.split(by_head, [nope, rope], dim=2)
        unrotated = torch.cat([q_rope, k_rope[:, None]], dim=1)  # [T, h+1, r]
        return q_nope, self.latent_norm(kv), rotate_pairs(unrotated, cos_sin[:, None])

    def finish(self, attended: torch.Tensor) -> torch.Tensor:
        """Project attended latents [T, h, c] to [T, d]."""
        values = torch.bmm(attended.transpose(0, 1), self.up.dense.value_up)  # [h, T, v]
        return self.output(values.transpose(0, 1).flatten(1))
