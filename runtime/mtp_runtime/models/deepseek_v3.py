"""DeepSeek-V3 and R1: MLA layers, dense first, then with a mixture of experts.

Source: DeepSeek-V3 technical report, section 2.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from mtp_export.families.deepseek_v3 import DeepseekV3Family
from mtp_export.families.modules import MoeModules, weight_name
from mtp_runtime.config import ModelConfig, RopeConfig, refuse_other_values, required
from mtp_runtime.layers.mla import Mla
from mtp_runtime.layers.moe import SigmoidRouter
from mtp_runtime.layers.rope import Rope, softmax_scale
from mtp_runtime.models.builder import ModelBuilder

_COMPUTED = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "hidden_act": "silu"}


@dataclass(frozen=True)
class DeepseekV3Config(ModelConfig):
    """Facts of a DeepSeek-V3 model beyond its tensors' names and shapes."""

    rope: RopeConfig
    heads: int
    latent: int
    nope: int
    value: int
    shared_experts: int
    experts_per_token: int
    expert_groups: int
    groups_per_token: int
    normalise_weights: bool
    routed_scale: float

    @classmethod
    def of(cls, family: DeepseekV3Family) -> DeepseekV3Config:
        """Read a family's config.json.

        Raises InvalidInputError for a missing field, UnsupportedError for a variant that is not
        computed.
        """
        config, sizes = family.config, family.sizes
        refuse_other_values(config, _COMPUTED)
        return cls(
            vocab=sizes.vocab,
            hidden=sizes.hidden,
            layers=family.num_hidden_layers,
            heads=sizes.heads,
            latent=sizes.latent,
            nope=sizes.nope,
            value=sizes.value,
            shared_experts=family.shared_experts,
            experts_per_token=required(config, "num_experts_per_tok"),
            expert_groups=config.get("n_group") or 1,
            groups_per_token=config.get("topk_group") or 1,
            normalise_weights=config.get("norm_topk_prob", True),
            routed_scale=float(config.get("routed_scaling_factor", 1.0)),
            rope=RopeConfig.from_config(config, sizes.rope),
            **ModelConfig.run_facts(config),
        )


@dataclass(frozen=True)
class DeepseekV3Builder(ModelBuilder):
    """Builds MLA layers with DeepSeek-V3's router."""

    family: DeepseekV3Family
    config: DeepseekV3Config

    @cached_property
    def rope(self) -> Rope:
        """Rotations that all layers share."""
        return Rope.build(self.config.rope, self.source.device)

    @property
    def shared_experts(self) -> int:
        return self.config.shared_experts

    def attention(self, layer: int) -> Mla:
        """Load one layer's attention; the halves of kv_b_proj become dense to be absorbed."""
        source, config, names = self.source, self.config, self.family.attention_modules(layer)
        ranked = names.query_down is not None
        halves = source.dense_matrix(names.latent_up)
        halves = halves.view(config.heads, config.nope + config.value, config.latent)
        return Mla(
            down=self.stacked(names.query_down or names.query_up, names.latent_down),
            query_norm=None if names.query_norm is None else self.norm(names.query_norm),
            query_up=source.linear(names.query_up) if ranked else None,
            latent_norm=self.norm(names.latent_norm),
            key_up=halves[:, : config.nope].contiguous(),
            value_up=halves[:, config.nope :].transpose(1, 2).contiguous(),
            output=source.linear(names.output),
            rope=self.rope,
            scale=softmax_scale(config.rope, config.nope + config.rope.size),
        )

    def router(self, names: MoeModules) -> SigmoidRouter:
        """Load a sparse layer's router."""
        source, config = self.source, self.config
        return SigmoidRouter(
            weight=source.raw(weight_name(names.router)).float().t().contiguous(),
            bias=source.raw(names.router_bias).float(),
            groups=config.expert_groups,
            groups_per_token=config.groups_per_token,
            experts_per_token=config.experts_per_token,
            normalise=config.normalise_weights,
            scale=torch.tensor([config.routed_scale], device=source.device),
        )
