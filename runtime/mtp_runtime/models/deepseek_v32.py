"""DeepSeek-V3.2 and GLM-5: DeepSeek-V3 whose queries attend to index_topk tokens of an indexer's
choice.

While a context has no more, that is dense attention, and the indexer changes nothing: models that
are loaded for such contexts leave it out, and run as DeepSeek-V3 does.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Self

from mtp_checkpoints.families.deepseek_v3 import DeepseekV3Family
from mtp_checkpoints.families.deepseek_v32 import DeepseekV32Family
from mtp_checkpoints.families.modules import weight_name
from mtp_runtime.layers.attention import Attention
from mtp_runtime.layers.norm import LayerNorm
from mtp_runtime.layers.rope import rotate_first_pairs, rotate_halves
from mtp_runtime.layers.sparse_mla import Indexer, SparseMla
from mtp_runtime.models.deepseek_v3 import DeepseekV3Builder, DeepseekV3Config

_KEY_NORM_EPS = 1e-6  # whatever rms_norm_eps is


@dataclass(frozen=True)
class DeepseekV32Config(DeepseekV3Config):
    """Facts of a DeepSeek-V3.2 model beyond its tensors' names and shapes."""

    index_topk: int = field(default=0, kw_only=True)

    @classmethod
    def of(cls, family: DeepseekV3Family) -> Self:
        """Read a family's config.json. Raises as MoeDecoderConfig.facts_of."""
        assert isinstance(family, DeepseekV32Family)
        return replace(super().of(family), index_topk=family.index_topk)

    def for_contexts(self, tokens: int | None) -> Self:
        """Return the config for contexts of at most some tokens; None: as many as are dense."""
        if tokens is not None or self.max_positions <= self.index_topk:
            return super().for_contexts(tokens)
        return replace(
            self,
            max_positions=self.index_topk,
            positions_bound="index_topk of config.json: with max_model_len torch computes the"
            " sparse attention of longer contexts",
        )

    @property
    def is_sparse(self) -> bool:
        """True where a context may hold more tokens than a query attends to."""
        return self.max_positions > self.index_topk


@dataclass(frozen=True)
class DeepseekV32Builder(DeepseekV3Builder):
    """Builds DeepSeek-V3's layers, with indexers where contexts are long enough."""

    family: DeepseekV32Family
    config: DeepseekV32Config

    def attention(self, layer: int) -> Attention:
        """Load one layer's attention."""
        owns = self.family.has_indexer(layer)
        if self.config.is_sparse:
            return SparseMla(self.mla(layer), self._indexer(layer), owns_indexer=owns)
        if owns:
            mtp = layer if layer in self.family.mtp_layers else None
            for spec in self.family.indexer_tensors(layer, mtp):
                self.source.leave_out(spec.name)
        return self.mla(layer)

    @cached_property
    def _indexers(self) -> dict[int, Indexer]:
        """Indexers that are loaded, by their layers."""
        return {}

    def _indexer(self, layer: int) -> Indexer:
        """Return the indexer that chooses for a layer: its own, or that of the last one before."""
        owner = self.family.indexer_of(layer)
        if owner not in self._indexers:
            self._indexers[owner] = self._load(owner)
        return self._indexers[owner]

    def _load(self, layer: int) -> Indexer:
        source, names = self.source, self.family.indexer_modules(layer)
        weight, bias = (
            source.tensor(f"{names.key_norm}.{last}").float() for last in ("weight", "bias")
        )
        return Indexer(
            query_up=source.linear(names.query_up),
            key=source.linear(names.key),
            key_norm=LayerNorm(weight, bias, _KEY_NORM_EPS),
            head_weights=source.raw(weight_name(names.head_weights)).float(),
            rope=self.rope,
            rotate=rotate_first_pairs if self.family.rotates_pairs else rotate_halves,
            topk=self.config.index_topk,
        )
