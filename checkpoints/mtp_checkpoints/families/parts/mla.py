"""Multi-head latent attention, as DeepSeek-V3 stores it.

Source: DeepSeek-V2 report (arXiv 2405.04434), section 2.1; index of the released DeepSeek-V3.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from mtp_checkpoints.families.base import (
    ModulePatterns,
    Role,
    RotaryRows,
    TensorMaker,
    TensorSpec,
)
from mtp_checkpoints.families.fields import Fields
from mtp_checkpoints.families.parts.rope import Rope
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


@dataclass(frozen=True, slots=True)
class Mla:
    """Latent attention from rows of `inputs` elements to the stream's `hidden`."""

    inputs: int
    hidden: int
    sizes: LatentSizes
    rope: Rope

    patterns: ClassVar[ModulePatterns] = ModulePatterns(
        linears={Role.ATTENTION: "self_attn.*_proj.*"},
        fused={
            ("q_a_proj", "kv_a_proj_with_mqa"): ("fused_qkv_a_proj", "fused_qkv_a_proj_with_mqa")
        },
        absorbed=("kv_b_proj",),
    )

    @classmethod
    def of(cls, fields: Fields) -> Mla:
        """Read a config.json (InvalidInputError for a missing or unusable size)."""
        ranked, rope = fields.has("q_lora_rank"), fields.whole("qk_rope_head_dim")
        if rope % 2:
            raise fields.unusable("qk_rope_head_dim", "an even number: pairs are rotated")
        sizes = LatentSizes(
            heads=fields.whole("num_attention_heads"),
            latent=fields.whole("kv_lora_rank"),
            nope=fields.whole("qk_nope_head_dim"),
            rope=rope,
            value=fields.whole("v_head_dim"),
            query_rank=fields.whole("q_lora_rank") if ranked else 0,
        )
        hidden = fields.whole("hidden_size")
        return cls(inputs=hidden, hidden=hidden, sizes=sizes, rope=Rope.of(fields, rope))

    def modules(self, prefix: str) -> MlaModules:
        """Names of one layer's modules."""
        ranked = self.sizes.query_rank > 0
        return MlaModules(
            query_down=f"{prefix}.q_a_proj" if ranked else None,
            query_norm=f"{prefix}.q_a_layernorm" if ranked else None,
            query_up=f"{prefix}.q_b_proj" if ranked else f"{prefix}.q_proj",
            latent_down=f"{prefix}.kv_a_proj_with_mqa",
            latent_norm=f"{prefix}.kv_a_layernorm",
            latent_up=f"{prefix}.kv_b_proj",
            output=f"{prefix}.o_proj",
        )

    def tensors(self, prefix: str, make: TensorMaker) -> Iterator[TensorSpec]:
        """Yield projections and norms of one layer."""
        sizes, names = self.sizes, self.modules(prefix)
        shapes = {
            names.latent_down: (sizes.latent + sizes.rope, self.inputs),
            names.latent_up: (sizes.heads * (sizes.nope + sizes.value), sizes.latent),
            names.output: (self.hidden, sizes.heads * sizes.value),
        }
        if names.query_down is not None and names.query_norm is not None:
            shapes[names.query_down] = (sizes.query_rank, self.inputs)
            yield make.norm(names.query_norm, sizes.query_rank)
        query = sizes.query_rank or self.inputs
        shapes[names.query_up] = (sizes.heads * (sizes.nope + sizes.rope), query)
        yield make.norm(names.latent_norm, sizes.latent)
        rotary = {
            names.latent_down: RotaryRows(sizes.latent + sizes.rope, sizes.latent, sizes.rope),
            names.query_up: RotaryRows(sizes.nope + sizes.rope, sizes.nope, sizes.rope),
        }
        for module, shape in shapes.items():
            yield make.matrix(module, shape, Role.ATTENTION, rotary=rotary.get(module))
