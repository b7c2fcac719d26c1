"""DeepSeek-V3 and R1: MLA, mixture of experts, and MTP layers stored behind the last main layer.

Source: README_WEIGHTS.md and the index of the released checkpoints (91,991 tensors).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from mtp_checkpoints.families.base import Role, RotaryRows, TensorSpec
from mtp_checkpoints.families.contract import MtpContract
from mtp_checkpoints.families.moe_decoder import MoeDecoderFamily
from mtp_kernels.sizes import LatentSizes


@dataclass(frozen=True, slots=True)
class MlaModules:
    """Modules of multi-head latent attention.

    query_down and query_norm are None where queries are projected in one step, by query_up.
    """

    query_down: str | None
    query_norm: str | None
    query_up: str
    latent_down: str  # to [latent | rope key]
    latent_norm: str
    latent_up: str  # by head, to [nope key | value]
    output: str


@dataclass(frozen=True)
class DeepseekV3Family(MoeDecoderFamily):
    """Tensors of one DeepSeek-V3 config."""

    refused = ("attention_bias", "tie_word_embeddings")
    fused = {("q_a_proj", "kv_a_proj_with_mqa"): ("fused_qkv_a_proj", "fused_qkv_a_proj_with_mqa")}
    absorbed = ("kv_b_proj",)
    # SGLang replaces model.layers.61 in configs by its own name.
    mtp_names: ClassVar[tuple[str, ...]] = ()
    # It shifts the positions of MTP rows by one throughout, which relative ones do not see.
    usual_contract = MtpContract(source="transformers, generate(use_mtp=True)")

    @cached_property
    def sizes(self) -> LatentSizes:
        """Sizes of attention (InvalidInputError for a missing or unusable one)."""
        ranked, rope = self.fields.has("q_lora_rank"), self._size("qk_rope_head_dim")
        if rope % 2:
            raise self.fields.unusable("qk_rope_head_dim", "an even number: pairs are rotated")
        return LatentSizes(
            heads=self._size("num_attention_heads"),
            latent=self._size("kv_lora_rank"),
            nope=self._size("qk_nope_head_dim"),
            rope=rope,
            value=self._size("v_head_dim"),
            query_rank=self._size("q_lora_rank") if ranked else 0,
        )

    def attention_modules(self, layer: int) -> MlaModules:
        """Modules of one layer's attention."""
        prefix, ranked = self.attention_prefix(layer), self.sizes.query_rank > 0
        return MlaModules(
            query_down=f"{prefix}.q_a_proj" if ranked else None,
            query_norm=f"{prefix}.q_a_layernorm" if ranked else None,
            query_up=f"{prefix}.q_b_proj" if ranked else f"{prefix}.q_proj",
            latent_down=f"{prefix}.kv_a_proj_with_mqa",
            latent_norm=f"{prefix}.kv_a_layernorm",
            latent_up=f"{prefix}.kv_b_proj",
            output=f"{prefix}.o_proj",
        )

    def attention_tensors(self, layer: int, mtp: int | None) -> Iterator[TensorSpec]:
        """Yield projections and norms of one layer's attention."""
        sizes, names = self.sizes, self.attention_modules(layer)
        shapes = {
            names.latent_down: (sizes.latent + sizes.rope, self.hidden),
            names.latent_up: (sizes.heads * (sizes.nope + sizes.value), sizes.latent),
            names.output: (self.hidden, sizes.heads * sizes.value),
        }
        if names.query_down is not None and names.query_norm is not None:
            shapes[names.query_down] = (sizes.query_rank, self.hidden)
            yield self._norm(names.query_norm, sizes.query_rank, mtp)
        query = sizes.query_rank or self.hidden
        shapes[names.query_up] = (sizes.heads * (sizes.nope + sizes.rope), query)
        yield self._norm(names.latent_norm, sizes.latent, mtp)
        rotary = {
            names.latent_down: RotaryRows(sizes.latent + sizes.rope, sizes.latent, sizes.rope),
            names.query_up: RotaryRows(sizes.nope + sizes.rope, sizes.nope, sizes.rope),
        }
        for module, shape in shapes.items():
            spec = self._linear(module, shape, Role.ATTENTION, mtp)
            yield spec._replace(rotary=rotary.get(module))
