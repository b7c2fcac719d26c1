"""GLM-5.3-Flash: delta attention with gates per channel, latent attention without positions to the
tokens that an indexer picks, hyper-connections around both, and an MTP layer without them.

Source: transformers' glm5_next and its conversion mapping; vLLM's glm5next.
"""

from __future__ import annotations

from dataclasses import replace

from mtp_checkpoints.families.base import SGLANG_DRAFT, Role
from mtp_checkpoints.families.contract import MtpContract
from mtp_checkpoints.families.engine_draft import SGLANG_NEXTN
from mtp_checkpoints.families.examples import EXPERTS, PLAIN, SMALL, VISION, Config, Example, Reader
from mtp_checkpoints.families.facts import refuse_set
from mtp_checkpoints.families.fields import Fields
from mtp_checkpoints.families.glm_moe_dsa import indexer_types
from mtp_checkpoints.families.listed_decoder import listed_decoder
from mtp_checkpoints.families.moe_decoder import check_expert_count, main_layers, mtp_count
from mtp_checkpoints.families.parts.feed_forward import GatedMlp, Moe
from mtp_checkpoints.families.parts.listed import Entry, Listed, matrix, norm
from mtp_checkpoints.families.releases import BIASED, PLAIN_GROUPS, Releases
from mtp_checkpoints.families.spec import LayerSpec, ModelSpec, MtpModules, MtpSpec
from mtp_checkpoints.families.text_part import TextPart

_CONTRACT = MtpContract(zero_first_embedding=True, source="vLLM")
_LINEAR, _FULL, _INDEXED = "linear_attention", "full_attention", "indexed_attention"
_DELTA = "delta attention with gates per channel"
_SPARSE = "latent attention without positions, of picked tokens"
_OWN = Role.ATTENTION
_MODULES = ("enorm", "hnorm", "eh_proj", "shared_head.norm")  # vLLM refuses a copy of the head


def spec(fields: Fields) -> ModelSpec:
    """Describe a config.json."""
    part = TextPart.of(fields)
    known = part.fields
    for key in ("attention_bias", "tie_word_embeddings"):
        refuse_set(known, key)
    main, count = main_layers(known), mtp_count(known)
    check_expert_count(known, "n_routed_experts", main + count)
    sparse, kinds = _sparse(known, main), _kinds(known, main)
    chooses = [kind == "full" for kind in indexer_types(known, main)]
    moe, mlp, streams = Moe.of(known), GatedMlp.of(known), hyper_connections(known)
    delta = Listed(f"{_DELTA}, hyper-connections", "", (*_delta(known), *streams))
    latent = {
        own: Listed(f"{_SPARSE}, hyper-connections", "", (*_latent(known, own), *streams))
        for own in (True, False)
    }
    layers = [
        LayerSpec(
            f"{part.prefix}.layers.{index}",
            delta if kinds[index] == _LINEAR else latent[chooses[index]],
            moe if sparse[index] else mlp,
            attention_name="",
        )
        for index in range(main)
    ]
    attention = Listed(_SPARSE, "", _latent(known, True))
    mtp = [
        LayerSpec(f"{part.prefix}.layers.{index}", attention, moe, attention_name="")
        for index in range(main, main + count)
    ]
    modules = [MtpSpec(one, MtpModules.without_copies(one.prefix, _MODULES)) for one in mtp]
    last = f"layers.{main}"
    listed = tuple((f"{one}.{last}", SGLANG_DRAFT) for one in (part.prefix, "model"))
    sglang = replace(SGLANG_NEXTN, listed=listed)
    return listed_decoder(part, layers, modules, _CONTRACT, sglang=sglang)


def _kinds(fields: Fields, layers: int) -> list[str]:
    """Return the kind of every main layer's attention: as listed, or latent in every fourth."""
    if fields.has("layer_types"):
        return [*fields.kinds("layer_types", (_LINEAR, _FULL, _INDEXED), layers)]
    return [_LINEAR if index % 4 != 3 else _FULL for index in range(layers)]


def _sparse(fields: Fields, layers: int) -> list[bool]:
    """Return which main layers have experts: as listed, or all but the first three."""
    key = "mlp_layer_types"
    if fields.has(key):
        return [kind == "sparse" for kind in fields.kinds(key, ("dense", "sparse"), layers)]
    return [index >= 3 for index in range(layers)]


def _latent(fields: Fields, chooses: bool) -> tuple[Entry, ...]:
    """Return latent attention, and its indexer where it has one of its own."""
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    rank, latent = fields.whole("q_lora_rank"), fields.whole("kv_lora_rank")
    key, value = fields.whole("qk_nope_head_dim"), fields.whole("v_head_dim")
    entries = [
        matrix("self_attn.q_a_proj", rank, hidden, _OWN),
        norm("self_attn.q_a_layernorm", rank),
        matrix("self_attn.q_b_proj", heads * key, rank, _OWN),
        matrix("self_attn.kv_a_proj_with_mqa", latent, hidden, _OWN),
        norm("self_attn.kv_a_layernorm", latent),
        matrix("self_attn.kv_b_proj", heads * (key + value), latent, _OWN),
        matrix("self_attn.o_proj", hidden, heads * value, _OWN),
    ]
    return (*entries, *(_indexer(fields, hidden, rank) if chooses else ()))


def _indexer(fields: Fields, hidden: int, rank: int) -> tuple[Entry, ...]:
    heads, head = fields.whole("index_n_heads"), fields.whole("index_head_dim")
    pool, name = fields.whole("index_kpool", 16), "self_attn.indexer"
    return (
        matrix(f"{name}.wq_b", heads * head, rank, Role.INDEXER),
        matrix(f"{name}.wk", head, hidden, Role.INDEXER),
        norm(f"{name}.k_norm", head),
        Entry(f"{name}.k_norm.bias", (head,), Role.NORM),
        matrix(f"{name}.weights_proj", heads, hidden, Role.INDEXER_HEADS),
        Entry(f"{name}.index_kpool_compress_ape", (pool, head), Role.INDEXER_HEADS),
        Entry(f"{name}.index_kpool_compress_gate", (head, hidden), Role.INDEXER_HEADS),
    )


def _delta(fields: Fields) -> tuple[Entry, ...]:
    own = fields.section("linear_attn_config")
    heads = own.whole("num_heads", fields.whole("linear_num_heads", 64))
    head = own.whole("head_dim", fields.whole("linear_head_dim", 128))
    width = own.whole("short_conv_kernel_size", fields.whole("linear_conv_kernel_dim", 4))
    hidden, inner, gates = fields.whole("hidden_size"), heads * head, Role.DELTA_GATES
    name = "self_attn"

    def convolution(one: str) -> Entry:
        return Entry(f"{name}.{one}_conv1d.weight", (inner, 1, width), Role.CONVOLUTION)

    return (
        *(matrix(f"{name}.{one}_proj", inner, hidden, _OWN) for one in "qkv"),
        *(convolution(one) for one in "qkv"),
        *(matrix(f"{name}.{one}_a_proj", head, hidden, gates) for one in "fg"),
        *(matrix(f"{name}.{one}_b_proj", inner, head, gates) for one in "fg"),
        matrix(f"{name}.b_proj", heads, hidden, gates),
        Entry(f"{name}.A_log", (heads,), gates),
        Entry(f"{name}.dt_bias", (inner,), gates),
        norm(f"{name}.o_norm", head),
        matrix(f"{name}.o_proj", hidden, inner, _OWN),
    )


def hyper_connections(fields: Fields) -> tuple[Entry, ...]:
    """Return the hyper-connections of a layer's streams, around attention and MLP."""
    streams, hidden = fields.whole("hc_mult", 4), fields.whole("hidden_size")
    mixed, role = streams * (streams + 2), Role.HYPER_CONNECTION
    return tuple(
        entry
        for part in ("attn", "ffn")
        for entry in (
            Entry(f"hc_{part}_base", (mixed,), role),
            Entry(f"hc_{part}_fn", (mixed, streams * hidden), role),
            Entry(f"hc_{part}_scale", (3,), role),
        )
    )


_GLM5_NEXT: Config = {
    "architectures": ["Glm5NextForConditionalGeneration"],
    "model_type": "glm5_next",
    "tie_word_embeddings": False,
    "text_config": {
        **{key: one for key, one in PLAIN.items() if key not in ("head_dim", "attention_bias")},
        "model_type": "glm5_next_text",
        "num_key_value_heads": 8,
        "num_hidden_layers": 5,
        "mlp_layer_types": ["dense", *["sparse"] * 4],
        "linear_num_heads": 2,
        "linear_head_dim": 16,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_topk": 32,
        "index_kpool": 16,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "pad_token_id": 0,
        "num_nextn_predict_layers": 1,
        **{key: SMALL[key] for key in ("q_lora_rank", "kv_lora_rank")},
        **{key: SMALL[key] for key in ("qk_nope_head_dim", "v_head_dim")},
        **EXPERTS,
    },
    "vision_config": VISION,
}
EXAMPLES = {
    "glm5_next": Example(
        _GLM5_NEXT,
        vllm=Reader(
            "Glm5NextMTP",
            {"mhc": True, "mla_use_nope": True, "indexer_rope_interleave": True, "n_group": 1}
            | {"topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
            needs_gpu=True,
        ),
    ),
}
# GLM-5.3-Flash: transformers' glm5_next, and its config.json in a test of omlx.
RELEASES: Releases = {
    "glm5_next": {
        **BIASED,
        **PLAIN_GROUPS,
        "rms_norm_eps": (1e-5,),
        "hc_eps": (1e-6,),
        "routed_scaling_factor": (2.5,),
        "swiglu_limit": (10.0,),
    }
}
