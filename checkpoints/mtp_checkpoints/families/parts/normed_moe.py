"""Mixture of experts between norms of its own, whose router takes rows as they come.

Source: transformers' gemma4, with enable_moe_block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from mtp_checkpoints.families.base import Role, TensorMaker, TensorSpec
from mtp_checkpoints.families.fields import Fields
from mtp_checkpoints.families.parts.feed_forward import GatedMlp, Moe, MoeNames, Router

_NAMES = MoeNames(router="router.proj", module="")


class NormedMoeModules(NamedTuple):
    """Tensors of the router beside its weight, and modules of the norms around the experts."""

    scale: str
    expert_scales: str
    norm: str
    output_norm: str


@dataclass(frozen=True, slots=True)
class NormedMoe(Moe):
    """Experts that take rows after a norm, and whose sum another norm follows.

    The router takes rows that are normed without a weight and multiplied by its scale [d]; the
    weights of what it picks are multiplied by expert_scales [e].
    """

    @classmethod
    def read(cls, fields: Fields) -> NormedMoe:
        """Read a config.json (InvalidInputError for a missing or unusable size)."""
        experts = fields.whole("num_experts")
        named = fields.named(num_experts_per_tok="top_k_experts")
        inner = fields.with_values(intermediate_size=fields.whole("moe_intermediate_size"))
        router = Router.softmax(named, experts, normalises=True)
        return cls(GatedMlp.of(inner), experts, 0, router, is_fused=True, names=_NAMES)

    def around(self, prefix: str) -> NormedMoeModules:
        """Names of what is around the experts of one layer."""
        return NormedMoeModules(
            f"{prefix}.router.scale",
            f"{prefix}.router.per_expert_scale",
            f"{prefix}.pre_feedforward_layernorm_2",
            f"{prefix}.post_feedforward_layernorm_2",
        )

    def tensors(self, prefix: str, make: TensorMaker) -> Iterator[TensorSpec]:
        """Yield the tensors of one layer."""
        around, hidden = self.around(prefix), self.expert.hidden
        yield from super(NormedMoe, self).tensors(prefix, make)  # slots leave no plain super()
        yield make.kept(around.scale, (hidden,), Role.ROUTER)
        yield make.kept(around.expert_scales, (self.experts,), Role.ROUTER)
        yield make.norm(around.norm, hidden)
        yield make.norm(around.output_norm, hidden)
