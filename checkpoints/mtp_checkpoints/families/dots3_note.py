"""dots3: latent attention with gates of heads, to the tokens that an indexer picks or, in most
layers and with sizes of their own, to the last ones; a mixture of experts, and an MTP layer of the
second kind with a dense MLP and an embedding of its own. Towers for images and sound stay as they
are.

Source: transformers' dots3_note; vLLM's dots3_note, SGLang's dots3_common.
"""

from __future__ import annotations

from dataclasses import replace

from mtp_checkpoints.families.base import SGLANG_DRAFT, Role, TensorMaker
from mtp_checkpoints.families.contract import MtpContract
from mtp_checkpoints.families.engine_draft import VLLM_LINEAR, EngineDraft
from mtp_checkpoints.families.examples import EXPERTS, LATENT, PLAIN, SMALL, Config, Example, Reader
from mtp_checkpoints.families.facts import ModelFacts, refuse_set
from mtp_checkpoints.families.fields import Fields
from mtp_checkpoints.families.gated_delta_decoder import at_most_one_mtp_layer
from mtp_checkpoints.families.hy_v4 import indexer
from mtp_checkpoints.families.listed_decoder import listed_decoder
from mtp_checkpoints.families.moe_decoder import check_expert_count, main_layers
from mtp_checkpoints.families.parts.feed_forward import GatedMlp, Moe
from mtp_checkpoints.families.parts.listed import Entry, Listed, matrix, norm
from mtp_checkpoints.families.parts.mla import Mla
from mtp_checkpoints.families.releases import PLAIN_GROUPS, Releases
from mtp_checkpoints.families.signs import USUAL_COUNTS
from mtp_checkpoints.families.spec import LayerSpec, ModelSpec, MtpModules, MtpSpec
from mtp_checkpoints.families.text_part import TextPart

_CONTRACT = MtpContract(source="SGLang. vLLM zeroes position 0")
_TOWERS = ("vision_encoder.", "audio_encoder.", "audio_adapter.")
_FULL, _INDEXED, _SLIDING = "full_attention", "indexed_attention", "sliding_attention"
_OF_SLIDING = (
    *("num_attention_heads", "q_lora_rank", "kv_lora_rank"),
    *("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
)
_HEAD = "model.heads.0"
_SGLANG = EngineDraft(f"{_HEAD}.decoder", projection=f"{_HEAD}.eh_proj")
_EMBEDDING = "model.mtp.embed_tokens.weight"
_MODULES = ("enorm", "hnorm", "eh_proj", "shared_head.norm")


def spec(fields: Fields) -> ModelSpec:
    """Describe a config.json."""
    for key in ("attention_bias", "tie_word_embeddings"):
        refuse_set(fields, key)
    main = main_layers(fields)
    count = at_most_one_mtp_layer(fields, USUAL_COUNTS["dots3_note"])
    check_expert_count(fields, "n_routed_experts", main)
    full, sliding = _attention(fields), _attention(_of_sliding(fields))
    if fields.flag("use_dsa", True):
        rank = fields.whole("q_lora_rank")
        picking = indexer(fields, fields.whole("hidden_size"), rank)
        full = replace(full, entries=(*full.entries, *picking))
    moe, mlp = _moe(fields), GatedMlp.of(fields)
    kinds = fields.kinds("layer_types", (_FULL, _INDEXED, _SLIDING), main)
    dense = fields.whole("first_k_dense_replace", 1, minimum=0)
    layers = [
        LayerSpec(
            f"model.layers.{index}",
            sliding if kind == _SLIDING else full,
            mlp if index < dense else moe,
            attention_name="",
        )
        for index, kind in enumerate(kinds)
    ]
    described = listed_decoder(
        replace(TextPart.whole(fields), carried=_TOWERS),
        layers,
        [_mtp(fields, LayerSpec(f"model.layers.{main}", sliding, mlp, attention_name=""))] * count,
        _CONTRACT,
        vllm=VLLM_LINEAR,
        sglang=_SGLANG,
    )
    return replace(described, mtp_names=(SGLANG_DRAFT, *described.mtp_names, _HEAD))


def _mtp(fields: Fields, layer: LayerSpec) -> MtpSpec:
    table = (fields.whole("vocab_size"), fields.whole("hidden_size"))
    own = Entry(_EMBEDDING, table, Role.OWN_EMBEDDING)
    return MtpSpec(layer, MtpModules.without_copies(layer.prefix, _MODULES), more=(own,))


def _of_sliding(fields: Fields) -> Fields:
    """Return the fields with the sizes of layers with a sliding window."""
    rope = fields.whole("swa_head_dim", 256) - fields.whole("swa_qk_nope_head_dim")
    known = fields.with_defaults(swa_qk_rope_head_dim=rope)
    return known.with_values(**{key: known.whole(f"swa_{key}") for key in _OF_SLIDING})


def _attention(fields: Fields) -> Listed:
    mla, make = Mla.of(fields), TensorMaker(ModelFacts.of(fields).dtype)
    heads, hidden = fields.whole("num_attention_heads"), fields.whole("hidden_size")
    return Listed(
        "latent attention with gates of heads",
        "",
        (
            *(Entry(one.name, one.shape, one.role) for one in mla.tensors("self_attn", make)),
            norm("self_attn.k_rope_only_layernorm", fields.whole("qk_rope_head_dim")),
            matrix("self_attn.g_proj", heads, hidden, Role.ATTENTION),
        ),
    )


def _moe(fields: Fields) -> Moe:
    """Return the mixture, whose shared experts may be as wide as they are told to be."""
    moe = Moe.of(fields)
    inner = fields.whole("moe_shared_expert_intermediate_size", moe.expert.inner)
    return replace(moe, shared_inner=moe.shared * inner)


_DOTS3_NOTE: Config = {
    **{key: one for key, one in PLAIN.items() if key not in ("head_dim", "attention_bias")},
    "architectures": ["Dots3NoteForCausalLM"],
    "model_type": "dots3_note",
    "pad_token_id": 0,
    "num_key_value_heads": 8,
    "head_dim": 24,
    "first_k_dense_replace": 1,
    "layer_types": ["full_attention", "full_attention", "sliding_attention"],
    "sliding_window_size": 32,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "moe_shared_expert_intermediate_size": 32,
    "num_nextn_predict_layers": 1,
    **{key: SMALL[key] for key in LATENT},
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_head_dim": 24,
    "swa_q_lora_rank": 32,
    "swa_kv_lora_rank": 64,
    "swa_v_head_dim": 16,
    "swa_qk_nope_head_dim": 16,
    "swa_qk_rope_head_dim": 8,
    **EXPERTS,
}
EXAMPLES = {
    "dots3_note": Example(
        _DOTS3_NOTE,
        vllm=Reader(
            "Dots3NoteMTP",
            {"swa_attention_gate_type": "headwise", "attention_gate_type": "headwise"}
            | {"swa_rope_theta": 10000.0, "apply_mla_qkv_lora_rescale": True},
            needs_gpu=True,
        ),
    ),
}
# dots3-note-prev: what vLLM's configs/dots3_note says of its router.
RELEASES: Releases = {"dots3_note": {**PLAIN_GROUPS, "topk_method": ("noaux_tc",)}}
