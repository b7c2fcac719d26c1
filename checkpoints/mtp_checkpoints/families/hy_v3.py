"""Hy3: grouped-query attention with norms of queries and keys, and a mixture of experts behind a
sigmoid router, under names of its own.

Source: transformers' hy_v3; vLLM's hy_v3_mtp, which alone zeroes position 0.
"""

from __future__ import annotations

from mtp_checkpoints.families.contract import MtpContract
from mtp_checkpoints.families.engine_draft import SGLANG_USUAL
from mtp_checkpoints.families.examples import PLAIN, Config, Example, Reader
from mtp_checkpoints.families.fields import Fields
from mtp_checkpoints.families.moe_decoder import DecoderNames, moe_decoder
from mtp_checkpoints.families.parts.feed_forward import MoeNames
from mtp_checkpoints.families.parts.gqa import Gqa
from mtp_checkpoints.families.releases import Releases
from mtp_checkpoints.families.spec import ModelSpec, MtpModules

_CONTRACT = MtpContract(source="transformers, generate(use_mtp=True), and SGLang")
_NAMES = DecoderNames(
    MoeNames("router.gate", "expert_bias", "shared_mlp"), MtpModules.with_last_norm
)
_FIELDS = {
    "n_routed_experts": "num_experts",
    "n_shared_experts": "num_shared_experts",
    "routed_scaling_factor": "router_scaling_factor",
    "norm_topk_prob": "route_norm",
    "use_qk_norm": "qk_norm",
}
_DEFAULTS = {"use_qk_norm": True, "partial_rotary_factor": 1.0, "n_shared_experts": 1}


def spec(fields: Fields) -> ModelSpec:
    """Describe a config.json."""
    known = fields.named(**_FIELDS).with_defaults(**_DEFAULTS)
    attention = Gqa.of(known)
    return moe_decoder(
        known, lambda layer: attention, usual_contract=_CONTRACT, sglang=SGLANG_USUAL, names=_NAMES
    )


_HY_V3: Config = PLAIN | {
    "architectures": ["HYV3ForCausalLM"],
    "model_type": "hy_v3",
    "first_k_dense_replace": 1,
    "qk_norm": True,
    "moe_intermediate_size": 64,
    "expert_hidden_dim": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "route_norm": True,
    "router_scaling_factor": 2.5,
    "hidden_act": "silu",
    "rope_theta": 11158840.0,
    "num_nextn_predict_layers": 1,
}
EXAMPLES = {
    "hy_v3": Example(
        _HY_V3,
        mtp_model={"mtp_mlp_layer_types": ["sparse"]},
        vllm=Reader("HYV3MTP"),
        sglang=Reader("HYV3ForCausalLMNextN", module="hunyuan_v3_nextn"),
    ),
}
# Hy3: config.json as a test of the engine kiln quotes it, and transformers' hy_v3.
RELEASES: Releases = {
    "hy_v3": {
        "rms_norm_eps": (1e-5,),
        "rope_theta": (11158840.0,),
        "router_scaling_factor": (2.826,),
        "moe_router_use_sigmoid": (True,),
        "route_norm": (True,),
    }
}
