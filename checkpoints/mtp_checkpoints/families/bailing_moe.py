"""Ling and Ling-2.0: grouped-query attention with joined projections, in 2.0 with norms of queries
and keys, a mixture of experts, and an MTP layer behind the last.

Source: vLLM's bailing_moe, which has the main model alone; SGLang's bailing_moe and
bailing_moe_nextn.
"""

from __future__ import annotations

from dataclasses import replace

from mtp_checkpoints.families.base import Role
from mtp_checkpoints.families.contract import MtpContract
from mtp_checkpoints.families.facts import refuse_set
from mtp_checkpoints.families.fields import Fields
from mtp_checkpoints.families.gated_delta_decoder import at_most_one_mtp_layer
from mtp_checkpoints.families.listed_decoder import listed_decoder
from mtp_checkpoints.families.moe_decoder import check_expert_count, main_layers
from mtp_checkpoints.families.parts.feed_forward import BIASED, GREEDY, GatedMlp, Moe, MoeNames
from mtp_checkpoints.families.parts.listed import Listed, matrix, norm, with_bias
from mtp_checkpoints.families.spec import LayerSpec, ModelSpec, MtpModules, MtpSpec
from mtp_checkpoints.families.text_part import TextPart

_CONTRACT = MtpContract(source="SGLang")
_NAMES = MoeNames(bias="gate.expert_bias")
_FIELDS = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}
_ATTENTION = "attention"


def spec(fields: Fields) -> ModelSpec:
    """Describe a config.json."""
    known = fields.named(**_FIELDS)
    for key in ("tie_word_embeddings", "use_bias", "multi_gate"):
        refuse_set(known, key)
    main, count = main_layers(known), at_most_one_mtp_layer(known, 0)
    check_expert_count(known, "n_routed_experts", main + count)
    dense = known.whole("first_k_dense_replace", 0, minimum=0)
    attention, moe, mlp = _attention(known), _moe(known), GatedMlp.of(known)
    layers = [
        LayerSpec(
            f"model.layers.{index}",
            attention,
            mlp if index < dense else moe,
            attention_name=_ATTENTION,
        )
        for index in range(main + count)
    ]
    mtp = [
        MtpSpec(replace(layer, feed_forward=moe), MtpModules.with_last_norm(layer.prefix))
        for layer in layers[main:]
    ]
    described = listed_decoder(TextPart.whole(known), layers[:main], mtp, _CONTRACT)
    return replace(described, embedding="model.word_embeddings", engines=("sglang",))


def _attention(fields: Fields) -> Listed:
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    head = fields.without_nulls().whole("head_dim", max(1, hidden // heads))
    rows = (heads + 2 * fields.whole("num_key_value_heads")) * head
    joined = matrix("query_key_value", rows, hidden, Role.ATTENTION)
    entries = [*(with_bias(joined) if fields.flag("use_qkv_bias", False) else (joined,))]
    if fields.flag("use_qk_norm", False):
        entries += [norm("query_layernorm", head), norm("key_layernorm", head)]
    entries.append(matrix("dense", hidden, heads * head, Role.ATTENTION))
    return Listed("attention with joined projections", _ATTENTION, tuple(entries))


def _moe(fields: Fields) -> Moe:
    """Return the mixture, whose shared experts may be as wide as they are told to be."""
    is_biased = fields.flag("moe_router_enable_expert_bias", False)
    known = fields.with_values(topk_method=BIASED if is_biased else GREEDY)
    moe = Moe.of(known, _NAMES)
    inner = known.whole("moe_shared_expert_intermediate_size", moe.expert.inner)
    return replace(moe, shared_inner=moe.shared * inner)
