"""DeepSeek-V3.2 and GLM-5 in contexts that their indexers pick whole: DeepSeek-V3's layers.

A query attends to index_topk tokens. While there are no more, that is dense attention, and the
indexer changes nothing; longer contexts are refused.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from mtp_export.families.deepseek_v3 import DeepseekV3Family
from mtp_export.families.deepseek_v32 import DeepseekV32Family
from mtp_runtime.layers.mla import Mla
from mtp_runtime.models.deepseek_v3 import DeepseekV3Builder, DeepseekV3Config


@dataclass(frozen=True)
class DeepseekV32Config(DeepseekV3Config):
    """Facts of a DeepSeek-V3.2 model beyond its tensors' names and shapes."""

    @classmethod
    def of(cls, family: DeepseekV3Family) -> Self:
        """Read a family's config.json. Raises as MoeDecoderConfig.facts_of."""
        assert isinstance(family, DeepseekV32Family)
        config = super().of(family)
        if config.max_positions <= family.index_topk:
            return config
        return replace(
            config,
            max_positions=family.index_topk,
            positions_bound="index_topk of config.json: in longer contexts attention is sparse,"
            " which the runtime does not compute",
        )


@dataclass(frozen=True)
class DeepseekV32Builder(DeepseekV3Builder):
    """Builds DeepSeek-V3's layers and leaves the indexers out."""

    family: DeepseekV32Family

    def attention(self, layer: int) -> Mla:
        """Load one layer's attention."""
        if self.family.has_indexer(layer):
            mtp = layer if layer in self.family.mtp_layers else None
            for spec in self.family.indexer_tensors(layer, mtp):
                self.source.leave_out(spec.name)
        return super().attention(layer)
