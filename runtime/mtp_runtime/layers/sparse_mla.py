"""Sparse latent attention: an indexer scores cached tokens by small keys of its own, and queries
attend to the best of them alone.

Source: DeepSeek-V3.2-Exp report, section 2.1 (DeepSeek Sparse Attention).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from mtp_checkpoints.errors import UnsupportedError
from mtp_kernels.batch_layout import BatchLayout
from mtp_kernels.verify_attention import has_split_cache, verify_attention
from mtp_runtime.cache import CacheSpec, LayerCache
from mtp_runtime.layers.attention import Attention, Choice, ForwardPass
from mtp_runtime.layers.linear import Linear
from mtp_runtime.layers.mla import Mla
from mtp_runtime.layers.norm import LayerNorm
from mtp_runtime.layers.rope import Rope

_MAX_SCORES = 1 << 24  # elements [s, h, t] that are held at a time


@dataclass(frozen=True, eq=False)
class Indexer:
    """Choice of the topk cached tokens with the best scores; all of them while there are no more.

    A score is the sum over heads of relu(query · key), times a weight of the head that depends on
    the row. head_weights [h, d] is float32. rotate rotates the first elements of queries and keys.
    """

    query_up: Linear  # from the normed low rank of the attention's query
    key: Linear
    key_norm: LayerNorm
    head_weights: torch.Tensor
    rope: Rope
    rotate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    topk: int

    @property
    def size(self) -> int:
        """Elements of a key."""
        return len(self.key_norm.weight)

    def __call__(
        self, x: torch.Tensor, query: torch.Tensor, cache: torch.Tensor, forward: ForwardPass
    ) -> Choice:
        """Choose for rows x [T, d], with their queries' low rank [T, q]; cache [pages, page, n]."""
        layout, cos_sin = forward.layout, forward.cos_sin(self.rope)
        queries = self.query_up(query).view(len(x), -1, self.size)  # [T, h, n]
        queries = self.rotate(queries, cos_sin[:, None])
        keys = self.rotate(self.key_norm(self.key(x)), cos_sin)
        cache.flatten(0, 1).index_copy_(0, layout.slots, keys)
        weights = F.linear(x.float(), self.head_weights)
        weights = weights * (queries.shape[1] * self.size) ** -0.5
        return self._choice(queries.float(), weights, cache, layout)

    def _choice(
        self,
        queries: torch.Tensor,  # [T, h, n]
        weights: torch.Tensor,  # [T, h]
        cache: torch.Tensor,
        layout: BatchLayout,
    ) -> Choice:
        lengths, ends = layout.kv_lens.tolist(), layout.cu_q.tolist()
        width = min(self.topk, max(lengths, default=0))
        slots = torch.zeros(len(queries), width, dtype=torch.int32, device=queries.device)
        for request, length in enumerate(lengths):
            pages = layout.page_table[request, : -(-length // cache.shape[1])].long()
            offsets = torch.arange(cache.shape[1], device=pages.device)
            request_slots = (pages[:, None] * cache.shape[1] + offsets).flatten()[
                :length
            ]  # slots [t]
            keys = cache.flatten(0, 1)[request_slots].float()
            step = max(1, _MAX_SCORES // (queries.shape[1] * length))
            for start in range(ends[request], ends[request + 1], step):
                rows = slice(start, min(start + step, ends[request + 1]))
                scores = torch.einsum("shn,tn->sht", queries[rows], keys).relu_()
                scores = torch.einsum("sht,sh->st", scores, weights[rows])
                best = self._best(scores, layout.positions[rows])
                slots[rows, : best.shape[1]] = request_slots[best].int()
        return Choice(slots, (layout.positions + 1).clamp(max=self.topk).int())

    def _best(self, scores: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return positions [s, k] of the best tokens, in order; of equal ones the first.

        What a row does not see comes behind all that it sees.
        """
        seen = torch.arange(scores.shape[1], device=scores.device) <= positions[:, None]
        ranked = scores.masked_fill(~seen, -torch.inf).sort(descending=True, stable=True).indices
        return ranked[:, : self.topk].sort().values


@dataclass(frozen=True)
class SparseMla(Attention):
    """Latent attention to the tokens that an indexer chooses; the cache is that of Mla and, in a
    layer that owns its indexer, its keys [pages, page, n]. Others share the choice of a layer
    before them."""

    mla: Mla
    indexer: Indexer
    owns_indexer: bool

    @property
    def row_elements(self) -> int:
        """Elements of Mla's rows, and of their queries and scores in the indexer."""
        return self.mla.row_elements + len(self.indexer.head_weights) * self.indexer.size

    def new_cache(self, spec: CacheSpec) -> LayerCache:
        """Make the cache of latents and rope keys, and of the indexer's keys.

        Raises UnsupportedError for devices whose attention takes no pages of one token.
        """
        if has_split_cache(spec.device):
            raise UnsupportedError(
                "The device computes no sparse attention",
                expected=f"contexts of at most {self.indexer.topk} tokens, or device cpu or cuda",
                found=spec.device,
                todo="Leave max_model_len out",
            )
        keys = (spec.empty(self.indexer.size),) if self.owns_indexer else ()
        return (*self.mla.new_cache(spec), *keys)

    def __call__(self, x: torch.Tensor, cache: LayerCache, forward: ForwardPass) -> torch.Tensor:
        """Attend from rows x [T, d] to the chosen latents; returns [T, d]."""
        mla, lowered, kv_cache = self.mla, self.mla.lower(x), cache[0].flatten(0, 1)
        q_latent, q_rope, cached = mla.project(lowered, forward.cos_sin(mla.rope))
        kv_cache.index_copy_(0, forward.layout.slots, cached)
        if self.owns_indexer:
            chosen = self.indexer(x, lowered.query, cache[1], forward)
            forward.choices[self.indexer] = chosen
        choice = forward.choices[self.indexer]
        # Every row is a request of its own whose pages are the tokens that it attends to.
        attended = verify_attention(
            q_latent,
            q_rope.contiguous(),
            kv_cache[:, None],
            page_table=choice.slots,
            kv_lens=choice.counts,
            cu_q=torch.arange(len(x) + 1, dtype=torch.int32, device=x.device),
            max_q_len=1,
            scale=mla.scale,
            backend=forward.backend,
        )[0]
        return mla.finish(attended)
