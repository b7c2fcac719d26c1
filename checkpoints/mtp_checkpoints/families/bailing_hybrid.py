"""Ling-3.0: delta attention with gates per channel, latent attention in every sixth layer, a
mixture of experts behind a sigmoid router, and an MTP layer with latent attention behind the last.

Source: transformers' bailing_hybrid and its conversion mapping; vLLM's bailing_moe_v3_mtp.
Ling-2.5, of the same model_type, has other layers: bailing_linear.py.
"""

from __future__ import annotations

from dataclasses import replace

from mtp_checkpoints.families.bailing_moe import ATTENTION, SGLANG_HYBRID, decoder, named
from mtp_checkpoints.families.base import Role, TensorMaker
from mtp_checkpoints.families.contract import MtpContract
from mtp_checkpoints.families.engine_draft import AS_STORED, EngineDraft
from mtp_checkpoints.families.examples import EXPERTS, PLAIN, SMALL, Config, Example, Reader
from mtp_checkpoints.families.facts import ModelFacts
from mtp_checkpoints.families.fields import Fields
from mtp_checkpoints.families.moe_decoder import main_layers
from mtp_checkpoints.families.parts.listed import Entry, Listed, matrix, norm
from mtp_checkpoints.families.parts.mla import Mla
from mtp_checkpoints.families.releases import Releases
from mtp_checkpoints.families.spec import ModelSpec

_CONTRACT = MtpContract(source="vLLM")
_SGLANG = replace(SGLANG_HYBRID, modules=(*SGLANG_HYBRID.modules, ("mlp.", "")))
_VLLM = EngineDraft(
    modules=((f"{ATTENTION}.", "self_attn."),),
    projection=AS_STORED,
    listed=((f".{ATTENTION}.", ".self_attn."), (f".{ATTENTION}*", ".self_attn*")),
    renames=frozenset({"compressed-tensors", "fp8", "modelopt", "awq", "auto-round"}),
    renames_patterns=False,
    fp8_ends=True,
)
_DEFAULTS = {"first_k_dense_replace": 2, "moe_router_enable_expert_bias": True}
_FULL, _LINEAR = "full_attention", "linear_attention"
_GRANULARITY = "gated_attention_proj_granularity_type"
_GRANULARITIES = ("head_wise", "element_wise")


def spec(fields: Fields) -> ModelSpec:
    """Describe a config.json."""
    known = named(fields).with_defaults(**_DEFAULTS)
    attentions = {_FULL: _latent(known), _LINEAR: _delta(known)}
    kinds = [*_kinds(known, main_layers(known)), _FULL]
    own = [attentions[kind] for kind in kinds]
    return decoder(known, own, _CONTRACT, vllm=_VLLM, sglang=_SGLANG)


def _kinds(fields: Fields, layers: int) -> list[str]:
    """Return the kind of every main layer's attention: as listed, or by a period."""
    if fields.has("layer_types"):
        return [*fields.kinds("layer_types", (_LINEAR, _FULL), layers)]
    period = fields.whole("layer_group_size", 6)
    return [_LINEAR if (index + 1) % period else _FULL for index in range(layers)]


def _latent(fields: Fields) -> Listed:
    """Return latent attention with gates: one per head, which transformers always has, or one per
    element, as engines build them by this field."""
    rows, hidden = fields.whole("num_attention_heads"), fields.whole("hidden_size")
    kind = fields.without_nulls().word(_GRANULARITY, "head_wise", choices=_GRANULARITIES)
    if kind == "element_wise":
        rows *= fields.whole("v_head_dim")
    gate = matrix("g_proj", rows, hidden, Role.DELTA_GATES)
    return latent("latent attention with gates", fields, gate)


def latent(title: str, fields: Fields, *more: Entry) -> Listed:
    """Return latent attention, whose last projection has a name of its own."""
    make = TensorMaker(ModelFacts.of(fields).dtype)
    entries = [
        Entry(one.name.removeprefix("-.").replace("o_proj", "dense"), one.shape, one.role)
        for one in Mla.of(fields).tensors("-", make)
    ]
    return Listed(title, ATTENTION, (*entries, *more))


def _delta(fields: Fields) -> Listed:
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    head, width = fields.whole("head_dim"), fields.whole("short_conv_kernel_size", 4)
    inner, own, gates = heads * head, Role.ATTENTION, Role.DELTA_GATES
    entries = [matrix(f"{name}_proj", inner, hidden, own) for name in "qkv"]
    entries += [
        Entry(f"{name}_conv1d.weight", (inner, 1, width), Role.CONVOLUTION) for name in "qkv"
    ]
    entries += [matrix(f"{name}_proj", inner, hidden, gates) for name in "fg"]
    entries += [
        matrix("b_proj", heads, hidden, gates),
        Entry("A_log", (heads,), gates),
        Entry("dt_bias", (inner,), gates),
        norm("o_norm", head),
        matrix("dense", hidden, inner, own),
    ]
    return Listed("delta attention with gates per channel", ATTENTION, tuple(entries))


_BAILING_HYBRID: Config = PLAIN | {
    "architectures": ["BailingHybridForCausalLM"],
    "model_type": "bailing_hybrid",
    "num_key_value_heads": 8,
    "num_hidden_layers": 4,
    "pad_token_id": 0,
    "layer_group_size": 2,
    "first_k_dense_replace": 1,
    "num_experts": 8,
    "num_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "short_conv_kernel_size": 4,
    "num_nextn_predict_layers": 1,
    **{key: SMALL[key] for key in ("kv_lora_rank", "qk_nope_head_dim")},
    **{key: SMALL[key] for key in ("qk_rope_head_dim", "v_head_dim")},
    **EXPERTS,
}
EXAMPLES = {
    "bailing_hybrid": Example(
        _BAILING_HYBRID,
        mtp_model={
            "mtp_layer_types": ["full_attention"],
            "mtp_mlp_layer_types": ["sparse"],
        },
        vllm=Reader(
            "BailingMoeV3MTPModel",
            {"gated_attention_proj_granularity_type": "head_wise"}
            | {
                "architectures": ["BailingMoeV3ForCausalLM"],
                "moe_shared_expert_intermediate_size": 64,
            }
            | {"use_bias": False},
        ),
        sglang=Reader(
            "BailingMoeForCausalLMNextN",
            {"use_kda": True, "use_bias": False, "use_qkv_bias": False, "use_qk_norm": False}
            | {"gated_attention_proj_granularity_type": "head_wise"}
            | {"moe_router_enable_expert_bias": True, "moe_shared_expert_intermediate_size": 64},
            module="bailing_moe_nextn",
        ),
    ),
}
# Ling-3.0-flash and Ling-3.0-tiny: their config.json in tests of two engines.
RELEASES: Releases = {
    "bailing_hybrid": {
        "rms_norm_eps": (1e-6,),
        "rope_theta": (6e6,),
        "norm_topk_prob": (True,),
        "routed_scaling_factor": (2.5,),
        "n_group": (8,),
        "topk_group": (4,),
    }
}
