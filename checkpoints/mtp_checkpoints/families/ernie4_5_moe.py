"""Ernie-4.5 with experts: grouped-query attention that rotates neighbouring elements, a softmax
router with a bias, and a dense MTP layer, whose modules are numbered each by itself.

Source: transformers' ernie4_5_moe; vLLM's ernie_mtp, SGLang's ernie4_eagle.
"""

from __future__ import annotations

from mtp_checkpoints.families.base import Role
from mtp_checkpoints.families.contract import MtpContract
from mtp_checkpoints.families.engine_draft import EngineDraft
from mtp_checkpoints.families.examples import PLAIN, Config, Example, Reader
from mtp_checkpoints.families.facts import refuse_set
from mtp_checkpoints.families.fields import Fields
from mtp_checkpoints.families.listed_decoder import listed_decoder, listed_layer
from mtp_checkpoints.families.moe_decoder import check_expert_count, main_layers, mtp_count
from mtp_checkpoints.families.parts.listed import Entry, Listed, gated_mlp, grouped, matrix
from mtp_checkpoints.families.releases import Releases
from mtp_checkpoints.families.spec import ModelSpec, MtpModules, MtpSpec
from mtp_checkpoints.families.text_part import TextPart

_CONTRACT = MtpContract(zero_first_embedding=True, source="vLLM and SGLang")


def spec(fields: Fields) -> ModelSpec:
    """Describe a config.json; the head is the embedding unless it says otherwise."""
    refuse_set(fields, "use_bias")
    known = fields.with_defaults(tie_word_embeddings=True)
    main = main_layers(known)
    check_expert_count(known, "moe_num_experts", main)
    hidden = known.whole("hidden_size")
    mlp = Listed(
        "gated MLP",
        "mlp",
        gated_mlp("", hidden, known.whole("intermediate_size"), Role.DENSE_MLP),
    )
    attention, moe, sparse = _attention(known), _moe(known), _sparse(known, main)
    return listed_decoder(
        TextPart.whole(known),
        [
            listed_layer(f"model.layers.{index}", attention, moe if index in sparse else mlp)
            for index in range(main)
        ],
        [
            MtpSpec(listed_layer(f"model.mtp_block.{index}", attention, mlp), _modules(index))
            for index in range(mtp_count(known))
        ],
        _CONTRACT,
        mtp_prefix="model.mtp_block",
        vllm=EngineDraft(f"model.layers.{main}"),
        sglang=EngineDraft("model.mtp_block"),
    )


def _modules(index: int) -> MtpModules:
    names = ("mtp_emb_norm", "mtp_hidden_norm", "mtp_linear_proj")
    embedding_norm, hidden_norm, projection = (f"model.{name}.{index}" for name in names)
    return MtpModules(None, embedding_norm, hidden_norm, projection, head_norm=None, head=None)


def _sparse(fields: Fields, main: int) -> range:
    """Return the layers with experts."""
    first = fields.whole("moe_layer_start_index", 1, minimum=0)
    last = fields.whole("moe_layer_end_index", -1, minimum=-1)
    step = fields.whole("moe_layer_interval", 1)
    start = next((at for at in range(first, main) if (at + 1) % step == 0), main)
    return range(start, main if last < 0 else min(last + 1, main), step)


def _attention(fields: Fields) -> Listed:
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    head = fields.whole("head_dim", max(1, hidden // heads))
    own = grouped(hidden, heads, fields.whole("num_key_value_heads"), head)
    return Listed("attention that rotates neighbouring elements", "self_attn", own)


def _moe(fields: Fields) -> Listed:
    hidden, experts = fields.whole("hidden_size"), fields.whole("moe_num_experts")
    inner = fields.whole("moe_intermediate_size")
    shared = inner * fields.whole("moe_num_shared_experts", 0, minimum=0)
    entries = [
        matrix("gate", experts, hidden, Role.ROUTER),
        Entry("moe_statics.e_score_correction_bias", (1, experts), Role.ROUTER),
    ]
    if shared:
        entries += gated_mlp("shared_experts.", hidden, shared, Role.SHARED_EXPERT)
    for expert in range(experts):
        entries += gated_mlp(f"experts.{expert}.", hidden, inner, Role.ROUTED_EXPERT)
    return Listed("experts behind a softmax router with a bias", "mlp", tuple(entries))


_ERNIE4_5_MOE: Config = PLAIN | {
    "architectures": ["Ernie4_5_MoeForCausalLM"],
    "model_type": "ernie4_5_moe",
    "tie_word_embeddings": True,
    "moe_num_experts": 8,
    "moe_k": 2,
    "moe_num_shared_experts": 2,
    "moe_intermediate_size": 32,
    "moe_layer_start_index": 1,
    "num_nextn_predict_layers": 1,
}
EXAMPLES = {
    "ernie4_5_moe": Example(
        _ERNIE4_5_MOE,
        vllm=Reader("ErnieMTP"),
        sglang=Reader("Ernie4_5_MoeForCausalLMMTP", {"use_bias": False}, module="ernie4_eagle"),
    ),
}
# ERNIE-4.5-21B-A3B: transformers' ernie4_5_moe, and its config.json in a test of mlx-swift-lm.
RELEASES: Releases = {"ernie4_5_moe": {"rms_norm_eps": (1e-5,), "rope_theta": (500000.0,)}}
