"""DeepSeek-V3 and R1: MLA layers, dense first, then with a mixture of experts.

Source: DeepSeek-V3 technical report, section 2.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from mtp_checkpoints.families.deepseek_v3 import DeepseekV3Family
from mtp_kernels.sizes import LatentSizes
from mtp_runtime.layers.attention import Attention
from mtp_runtime.layers.mla import Mla
from mtp_runtime.layers.rope import softmax_scale
from mtp_runtime.models.moe_decoder import MoeDecoderBuilder, MoeDecoderConfig


@dataclass(frozen=True)
class DeepseekV3Config(MoeDecoderConfig):
    """Facts of a DeepSeek-V3 model beyond its tensors' names and shapes."""

    sizes: LatentSizes

    @classmethod
    def of(cls, family: DeepseekV3Family) -> Self:
        """Read a family's config.json. Raises as MoeDecoderConfig.facts_of."""
        return cls(sizes=family.sizes, **cls.facts_of(family, family.sizes.rope))


@dataclass(frozen=True)
class DeepseekV3Builder(MoeDecoderBuilder):
    """Builds MLA layers with DeepSeek-V3's router."""

    family: DeepseekV3Family
    config: DeepseekV3Config

    def attention(self, layer: int) -> Attention:
        """Load one layer's attention."""
        return self.mla(layer)

    def mla(self, layer: int) -> Mla:
        """Load one layer's attention, or the own heads of it; the halves of kv_b_proj become dense
        to be absorbed."""
        source, sizes, names = self.source, self.config.sizes, self.family.attention_modules(layer)
        heads = source.split.nonempty_parts(sizes.heads, "heads")
        own = heads[source.split.rank]
        query = _rows(own, sizes.nope + sizes.rope)
        down = names.query_down
        halves = source.dense_matrix(names.latent_up, _rows(own, sizes.nope + sizes.value))
        halves = halves.view(len(own), sizes.nope + sizes.value, sizes.latent)
        return Mla(
            down=self.joined(
                source.weight(down) if down else source.weight(names.query_up, query),
                source.weight(names.latent_down),
            ),
            query_norm=None if names.query_norm is None else self.norm(names.query_norm),
            query_up=source.linear(names.query_up, query) if down else None,
            latent_norm=self.norm(names.latent_norm),
            key_up=halves[:, : sizes.nope].contiguous(),
            value_up=halves[:, sizes.nope :].transpose(1, 2).contiguous(),
            output=source.row_parallel(names.output, [_rows(p, sizes.value) for p in heads]),
            rope=self.rope,
            sizes=sizes._replace(heads=len(own)),
            scale=softmax_scale(self.config.rope, sizes.nope + sizes.rope),
        )


def _rows(heads: range, size: int) -> range:
    """Return the rows of some heads of a size each."""
    return range(heads.start * size, heads.stop * size)
