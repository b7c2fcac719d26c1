"""GLM-4.5, 4.6 and 4.7: grouped-query attention, dense layers first, then sparse ones.

Source: vLLM's glm4_moe; transformers' glm4_moe.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mtp_checkpoints.families.glm4_moe import Glm4MoeFamily
from mtp_kernels.sizes import GroupedSizes
from mtp_runtime.layers.gqa import Gqa
from mtp_runtime.models.moe_decoder import MoeDecoderBuilder, MoeDecoderConfig


@dataclass(frozen=True)
class Glm4MoeConfig(MoeDecoderConfig):
    """Facts of a GLM-4.5 model beyond its tensors' names and shapes."""

    sizes: GroupedSizes

    @classmethod
    def of(cls, family: Glm4MoeFamily) -> Glm4MoeConfig:
        """Read a family's config.json. Raises as MoeDecoderConfig.facts_of."""
        return cls(sizes=family.sizes, **cls.facts_of(family, family.sizes.rope))


@dataclass(frozen=True)
class Glm4MoeBuilder(MoeDecoderBuilder):
    """Builds layers of grouped-query attention with DeepSeek-V3's router."""

    family: Glm4MoeFamily
    config: Glm4MoeConfig

    def attention(self, layer: int) -> Gqa:
        """Load one layer's attention."""
        source, sizes, names = self.source, self.config.sizes, self.family.attention_modules(layer)
        # Each key head with the queries that share it.
        groups = source.split.nonempty_parts(sizes.kv_heads, "key heads")
        own, each = groups[source.split.rank], sizes.heads // sizes.kv_heads
        rows = {
            names.query: _rows(own, each * sizes.head),
            names.key: _rows(own, sizes.head),
            names.value: _rows(own, sizes.head),
        }
        bias = None
        if sizes.has_bias:
            bias = torch.cat(
                [
                    source.tensor(f"{module}.bias")[part.start : part.stop]
                    for module, part in rows.items()
                ]
            )
        return Gqa(
            qkv=self.joined(*(source.weight(module, part) for module, part in rows.items())),
            bias=bias,
            query_norm=None if names.query_norm is None else self.norm(names.query_norm),
            key_norm=None if names.key_norm is None else self.norm(names.key_norm),
            output=source.row_parallel(
                names.output, [_rows(part, each * sizes.head) for part in groups]
            ),
            rope=self.rope,
            sizes=sizes._replace(heads=each * len(own), kv_heads=len(own)),
        )


def _rows(heads: range, size: int) -> range:
    """Return the rows of some heads of a size each."""
    return range(heads.start * size, heads.stop * size)
