"""Ling and Ling-2.0: grouped-query attention with joined projections, in 2.0 with norms of queries
and keys, a mixture of experts, and an MTP layer behind the last.

Source: vLLM's bailing_moe, which has the main model alone; SGLang's bailing_moe and
bailing_moe_nextn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mtp_checkpoints.families.base import Role
from mtp_checkpoints.families.contract import MtpContract
from mtp_checkpoints.families.engine_draft import (
    AS_STORED,
    SGLANG_NEXTN,
    VLLM_USUAL,
    EngineDraft,
)
from mtp_checkpoints.families.examples import BAILING_MOE_V2, Config, Example, Reader
from mtp_checkpoints.families.facts import refuse_set
from mtp_checkpoints.families.fields import Fields
from mtp_checkpoints.families.gated_delta_decoder import at_most_one_mtp_layer
from mtp_checkpoints.families.listed_decoder import listed_decoder
from mtp_checkpoints.families.moe_decoder import check_expert_count, main_layers
from mtp_checkpoints.families.parts.feed_forward import BIASED, GREEDY, GatedMlp, Moe, MoeNames
from mtp_checkpoints.families.parts.listed import Entry, Listed, matrix, norm, with_bias
from mtp_checkpoints.families.releases import Releases
from mtp_checkpoints.families.spec import LayerSpec, ModelSpec, MtpModules, MtpSpec
from mtp_checkpoints.families.text_part import TextPart

_CONTRACT = MtpContract(source="SGLang")
_NAMES = MoeNames(bias="gate.expert_bias")
_KNOWN = ("sglang",)
ATTENTION = "attention"
_OUTPUT = (f"{ATTENTION}.dense", f"{ATTENTION}.o_proj")  # of models/bailing_moe_nextn.py
_SGLANG = replace(SGLANG_NEXTN, projection=AS_STORED, listed=(_OUTPUT,))
# The layer of a decoder that mixes two attentions has its own name, and another of the output.
SGLANG_HYBRID = replace(_SGLANG, layer=None, modules=(_OUTPUT,))


def spec(fields: Fields) -> ModelSpec:
    """Describe a config.json."""
    known = named(fields)
    refuse_set(known, "multi_gate")
    attentions = [joined_attention(known, known.whole("num_key_value_heads"))]
    return replace(decoder(known, attentions * (main_layers(known) + 1), _CONTRACT), engines=_KNOWN)


def named(fields: Fields) -> Fields:
    """Return the fields by their usual names."""
    return fields.named(
        n_routed_experts="num_experts", n_shared_experts="num_shared_experts"
    ).with_defaults(n_shared_experts=1)


def decoder(
    fields: Fields,
    attentions: Sequence[Listed],
    contract: MtpContract,
    *,
    vllm: EngineDraft = VLLM_USUAL,
    sglang: EngineDraft = _SGLANG,
) -> ModelSpec:
    """Describe a decoder of any attentions, those of main layers and of the MTP layer."""
    for key in ("tie_word_embeddings", "use_bias"):
        refuse_set(fields, key)
    count, last = at_most_one_mtp_layer(fields, 0), len(attentions) - 1
    check_expert_count(fields, "n_routed_experts", last + count)
    dense = fields.whole("first_k_dense_replace", 0, minimum=0)
    moe, mlp = _moe(fields), GatedMlp.of(fields)
    layers = [
        LayerSpec(
            f"model.layers.{index}",
            attention,
            mlp if index < min(dense, last) else moe,
            attention_name=attention.name,
        )
        for index, attention in enumerate(attentions)
    ]
    module = MtpSpec(layers[last], MtpModules.with_last_norm(layers[last].prefix))
    described = listed_decoder(
        TextPart.whole(fields),
        layers[:last],
        [module] * count,
        contract,
        vllm=vllm,
        sglang=sglang,
    )
    return replace(described, embedding="model.word_embeddings")


def joined_attention(fields: Fields, kv_heads: int, *more: Entry) -> Listed:
    """Return attention whose queries, keys and values are one projection, and what else it has."""
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    head = fields.without_nulls().whole("head_dim", max(1, hidden // heads))
    joined = matrix("query_key_value", (heads + 2 * kv_heads) * head, hidden, Role.ATTENTION)
    entries = [*(with_bias(joined) if fields.flag("use_qkv_bias", False) else (joined,))]
    if fields.flag("use_qk_norm", False):
        entries += [norm("query_layernorm", head), norm("key_layernorm", head)]
    entries.append(matrix("dense", hidden, heads * head, Role.ATTENTION))
    return Listed("attention with joined projections", ATTENTION, (*entries, *more))


def _moe(fields: Fields) -> Moe:
    """Return the mixture, whose shared experts may have a width of their own."""
    is_biased = fields.flag("moe_router_enable_expert_bias", False)
    known = fields.with_values(topk_method=BIASED if is_biased else GREEDY)
    moe = Moe.of(known, _NAMES)
    inner = known.whole("moe_shared_expert_intermediate_size", moe.expert.inner)
    return replace(moe, shared_inner=moe.shared * inner)


_OF_V2 = ("first_k_dense_replace", "n_group", "topk_group", "score_function", "use_qk_norm")
_BAILING_MOE: Config = {
    **{key: value for key, value in BAILING_MOE_V2.items() if key not in _OF_V2},
    "architectures": ["BailingMoeForCausalLM"],
    "model_type": "bailing_moe",
    "moe_router_enable_expert_bias": False,
    "use_qkv_bias": True,
}
_READ = {"embedding_dropout": 0.0, "use_qkv_bias": False, "use_rmsnorm": True, "rope_theta": 1e4}
EXAMPLES = {
    "bailing_moe": Example(
        _BAILING_MOE,
        in_transformers=False,
        vllm_main=Reader("BailingMoeForCausalLM", _READ | {"first_k_dense_replace": 0}),
        sglang=Reader(
            "BailingMoeForCausalLMNextN",
            _READ | {"first_k_dense_replace": 0, "use_qkv_bias": True},
            module="bailing_moe_nextn",
        ),
    ),
    "bailing_moe_v2": Example(
        BAILING_MOE_V2,
        in_transformers=False,
        vllm_main=Reader("BailingMoeV2ForCausalLM", _READ),
        sglang=Reader("BailingMoeForCausalLMNextN", _READ, module="bailing_moe_nextn"),
    ),
}
# Ling-mini-2.0: the class of its config.json, as NeMo-AutoModel has it. Of bailing_moe_v2 no
# release was read.
RELEASES: Releases = {
    "bailing_moe": {
        "rms_norm_eps": (1e-6,),
        "rope_theta": (600000.0,),
        "norm_topk_prob": (True,),
        "n_group": (8,),
        "topk_group": (4,),
    },
    "bailing_moe_v2": None,
}
