"""Ling-2.5: linear attention with joined projections and gates, latent attention in the last layer
of each group and in the MTP layer, and the mixture of experts of Ling-2.0.

Source: vLLM's bailing_moe_linear and bailing_moe_mtp; SGLang's bailing_moe_linear.
"""

from __future__ import annotations

from mtp_checkpoints.families.bailing_hybrid import latent
from mtp_checkpoints.families.bailing_moe import (
    ATTENTION,
    SGLANG_HYBRID,
    decoder,
    joined_attention,
    named,
)
from mtp_checkpoints.families.base import Role
from mtp_checkpoints.families.contract import MtpContract
from mtp_checkpoints.families.engine_draft import EngineDraft
from mtp_checkpoints.families.examples import BAILING_MOE_V2, SMALL, Config, Example, Reader
from mtp_checkpoints.families.fields import Fields
from mtp_checkpoints.families.moe_decoder import main_layers
from mtp_checkpoints.families.parts.listed import matrix, norm
from mtp_checkpoints.families.releases import Releases
from mtp_checkpoints.families.spec import ModelSpec

_CONTRACT = MtpContract(zero_first_embedding=True, source="vLLM. SGLang keeps position 0")
_VLLM = EngineDraft(
    modules=((f"{ATTENTION}.dense", "self_attn.o_proj"), (f"{ATTENTION}.", "self_attn."))
)


def spec(fields: Fields) -> ModelSpec:
    """Describe a config.json."""
    known = named(fields)
    hidden, heads = known.whole("hidden_size"), known.whole("num_attention_heads")
    inner = heads * known.without_nulls().whole("head_dim", max(1, hidden // heads))
    gates = (matrix("g_proj", inner, hidden, Role.ATTENTION), norm("g_norm", inner))
    linear, full = joined_attention(known, heads, *gates), latent("latent attention", known)
    period = known.whole("layer_group_size", 1)
    kinds = [linear if (index + 1) % period else full for index in range(main_layers(known))]
    return decoder(known, [*kinds, full], _CONTRACT, vllm=_VLLM, sglang=SGLANG_HYBRID)


_BAILING_LINEAR: Config = BAILING_MOE_V2 | {
    "architectures": ["BailingMoeV2_5ForCausalLM"],
    "model_type": "bailing_hybrid",
    "num_hidden_layers": 4,
    "layer_group_size": 2,
    "group_norm_size": 2,
    **{key: SMALL[key] for key in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim")},
    **{key: SMALL[key] for key in ("qk_rope_head_dim", "v_head_dim")},
}
_READ = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 32}
EXAMPLES = {
    "BailingMoeV2_5ForCausalLM": Example(
        _BAILING_LINEAR,
        in_transformers=False,
        vllm=Reader(
            "BailingMoeV25MTPModel",
            _READ,
        ),
        sglang=Reader(
            "BailingMoeForCausalLMNextN",
            {"use_kda": False, "use_bias": False, "use_qkv_bias": False},
            module="bailing_moe_nextn",
        ),
        vllm_main=Reader("BailingMoeV25ForCausalLM", _READ | {"use_qkv_bias": False}),
    ),
}
# Ling-2.5-1T and 2.6-flash: the defaults of transformers' bailing2_5_moe, which are made for them,
# and the base that the model card of 2.6-flash and its converter for llama.cpp name.
RELEASES: Releases = {
    "BailingMoeV2_5ForCausalLM": {
        "rms_norm_eps": (1e-6,),
        "rope_theta": (6e6,),
        "norm_topk_prob": (True,),
        "routed_scaling_factor": (2.5,),
        "n_group": (8,),
        "topk_group": (4,),
    }
}
