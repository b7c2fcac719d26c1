"""Decoders with a mixture of experts behind DeepSeek-V3's router, around any attention.

Source: DeepSeek-V3 technical report, section 2.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from mtp_checkpoints.families.modules import MoeModules, weight_name
from mtp_checkpoints.families.moe_decoder import MoeDecoderFamily
from mtp_kernels.sizes import Routing
from mtp_runtime.config import ModelConfig, RopeConfig, refuse_other_values
from mtp_runtime.layers.moe import SigmoidRouter
from mtp_runtime.layers.rope import Rope
from mtp_runtime.models.builder import ModelBuilder

_COMPUTED = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "hidden_act": "silu"}


@dataclass(frozen=True)
class MoeDecoderConfig(ModelConfig):
    """Facts of a decoder beyond its tensors' names and shapes; a model adds its attention's."""

    rope: RopeConfig
    shared_experts: int
    routing: Routing

    @staticmethod
    def facts_of(family: MoeDecoderFamily, rope_elements: int) -> dict[str, Any]:
        """Take a family's facts; rope_elements is the rotated part of a head.

        Raises InvalidInputError for a missing field, UnsupportedError for a variant that is not
        computed.
        """
        facts, router = family.facts, family.router
        found = {
            "scoring_func": router.scoring,
            "topk_method": router.method,
            "hidden_act": facts.hidden_act,
        }
        refuse_other_values(found, _COMPUTED)
        return {
            "vocab": family.vocab,
            "hidden": family.hidden,
            "layers": family.num_hidden_layers,
            "shared_experts": family.shared_experts,
            "routing": router.routing,
            "rope": RopeConfig.of(facts.rope, rope_elements),
            **ModelConfig.run_facts(facts),
        }


@dataclass(frozen=True)
class MoeDecoderBuilder(ModelBuilder):
    """Builds rotations and routers; a model adds its attention."""

    config: MoeDecoderConfig

    @cached_property
    def rope(self) -> Rope:
        """Rotations that all layers share."""
        return Rope.build(self.config.rope, self.source.device)

    @property
    def shared_experts(self) -> int:
        return self.config.shared_experts

    def router(self, names: MoeModules) -> SigmoidRouter:
        """Load a sparse layer's router."""
        source, routing = self.source, self.config.routing
        return SigmoidRouter(
            weight=source.raw(weight_name(names.router)).float().t().contiguous(),
            bias=source.raw(names.router_bias).float(),
            routing=routing,
            scale=torch.tensor([routing.scale], device=source.device),
        )
