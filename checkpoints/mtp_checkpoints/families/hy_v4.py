"""Hy4: latent attention with gates and sinks to the tokens that an indexer picks, hyper-connections
around both parts, and an MTP layer without them.

Source: transformers' hy_v4 and its conversion mapping; vLLM's hy_v4; SGLang's hunyuan_v4_nextn.
"""

from __future__ import annotations

from dataclasses import replace

from mtp_checkpoints.families.base import SGLANG_DRAFT, Role
from mtp_checkpoints.families.contract import MtpContract
from mtp_checkpoints.families.engine_draft import EngineDraft
from mtp_checkpoints.families.examples import EXPERTS, LATENT, PLAIN, SMALL, Config, Example, Reader
from mtp_checkpoints.families.facts import refuse_set
from mtp_checkpoints.families.fields import Fields
from mtp_checkpoints.families.glm_moe_dsa import indexer_types
from mtp_checkpoints.families.listed_decoder import listed_decoder
from mtp_checkpoints.families.moe_decoder import check_expert_count, main_layers, mtp_count
from mtp_checkpoints.families.parts.feed_forward import GatedMlp, Moe
from mtp_checkpoints.families.parts.listed import Entry, Listed, matrix, norm
from mtp_checkpoints.families.parts.mla import Mla
from mtp_checkpoints.families.releases import PLAIN_GROUPS, Releases
from mtp_checkpoints.families.spec import LayerSpec, ModelSpec, MtpModules, MtpSpec
from mtp_checkpoints.families.text_part import TextPart

_CONTRACT = MtpContract(source="vLLM and SGLang")
_MTP = "model.mtp_layers"
# Of models/hunyuan_v4_nextn.py, which has no name before its first dot.
_SGLANG = EngineDraft(
    f".{SGLANG_DRAFT}",
    listed=((f"{_MTP}.0", SGLANG_DRAFT), ("mtp_layers.0", SGLANG_DRAFT)),
    renames=frozenset({"fp8"}),
)
_SPARSE = "latent attention with gates and sinks, of picked tokens"
_OWN = Role.ATTENTION


def spec(fields: Fields) -> ModelSpec:
    """Describe a config.json."""
    for key in ("attention_bias", "tie_word_embeddings"):
        refuse_set(fields, key)
    main = main_layers(fields)
    # A count of 2 is that of one layer too, as vLLM reads it.
    count = max(mtp_count(fields) - 1, min(mtp_count(fields), 1))
    check_expert_count(fields, "n_routed_experts", main + count)
    chooses = [kind == "full" for kind in _indexers(fields, main)]
    moe = replace(Moe.of(fields), is_fused=True)
    mlp, streams = GatedMlp.of(fields), _streams(fields)
    attention = {
        own: Listed(f"{_SPARSE}, hyper-connections", "", (*_latent(fields, own), *streams))
        for own in (True, False)
    }
    layers = [
        LayerSpec(
            f"model.layers.{index}",
            attention[chooses[index]],
            moe if sparse else mlp,
            attention_name="",
        )
        for index, sparse in enumerate(_sparse(fields, main))
    ]
    of_mtp = Listed(_SPARSE, "", _latent(fields, True))
    mtp = [LayerSpec(f"{_MTP}.{index}", of_mtp, moe, attention_name="") for index in range(count)]
    described = listed_decoder(
        TextPart.whole(fields),
        layers,
        [MtpSpec(layer, MtpModules.with_last_norm(layer.prefix)) for layer in mtp],
        _CONTRACT,
        mtp_prefix=_MTP,
        sglang=_SGLANG,
    )
    return replace(described, more=_head(fields), may_fuse=True)


def _indexers(fields: Fields, layers: int) -> tuple[str, ...]:
    """Return the kind of every main layer's indexer: as listed, or own ones in the first layer and
    in every fourth from the second."""
    if fields.has("indexer_types"):
        return indexer_types(fields, layers)
    return tuple(
        "full" if index in (0, 1) or index % 4 == 1 else "shared" for index in range(layers)
    )


def _sparse(fields: Fields, layers: int) -> list[bool]:
    """Return which main layers have experts: as listed, or all but the first."""
    key = "mlp_layer_types"
    if fields.has(key):
        return [kind == "sparse" for kind in fields.kinds(key, ("dense", "sparse"), layers)]
    return [index > 0 for index in range(layers)]


def _latent(fields: Fields, chooses: bool) -> tuple[Entry, ...]:
    """Return latent attention, and its indexer where it has one of its own."""
    heads, key, rope, value, latent, rank = Mla.of(fields).sizes
    hidden, name = fields.whole("hidden_size"), "self_attn"
    entries = [
        matrix(f"{name}.q_a_proj", rank, hidden, _OWN),
        norm(f"{name}.q_a_layernorm", rank),
        matrix(f"{name}.q_b_proj", heads * (key + rope), rank, _OWN),
        matrix(f"{name}.kv_a_proj_with_mqa", latent + rope, hidden, _OWN),
        norm(f"{name}.kv_a_layernorm", latent),
        matrix(f"{name}.kv_b_proj", heads * (key + value), latent, _OWN),
        matrix(f"{name}.o_proj", hidden, heads * value, _OWN),
        matrix(f"{name}.linear_gate", heads * value, hidden, _OWN),
        Entry(f"{name}.learnable_sink_param", (heads,), _OWN),
    ]
    return (*entries, *(indexer(fields, hidden, rank) if chooses else ()))


def indexer(fields: Fields, hidden: int, rank: int) -> tuple[Entry, ...]:
    """Return what picks the tokens to attend to, given the size of what queries are made of."""
    heads, head = fields.whole("index_n_heads"), fields.whole("index_head_dim")
    name = "self_attn.indexer"
    return (
        matrix(f"{name}.wq_b", heads * head, rank, Role.INDEXER),
        matrix(f"{name}.wk", head, hidden, Role.INDEXER),
        norm(f"{name}.k_norm", head),
        Entry(f"{name}.k_norm.bias", (head,), Role.NORM),
        matrix(f"{name}.weights_proj", heads, hidden, Role.INDEXER_HEADS),
    )


def _streams(fields: Fields) -> tuple[Entry, ...]:
    """Return the hyper-connections of a layer's streams, around attention and MLP."""
    streams, hidden = fields.whole("hc_mult", 4), fields.whole("hidden_size")
    return tuple(
        entry
        for part in ("attn", "mlp")
        for entry in _mixing(f"hc_{part}_layer.hc_pre.hc", (2 * streams, streams * hidden), 2)
    )


def _head(fields: Fields) -> tuple[Entry, ...]:
    """Return what makes one stream of all, before the last norm."""
    streams, hidden = fields.whole("hc_mult", 4), fields.whole("hidden_size")
    return _mixing("model.hc_head.hc_head", (streams, streams * hidden), 1)


def _mixing(name: str, shape: tuple[int, int], scales: int) -> tuple[Entry, ...]:
    role = Role.HYPER_CONNECTION
    return (
        Entry(f"{name}_fn", shape, role),
        Entry(f"{name}_base", shape[:1], role),
        Entry(f"{name}_scale", (scales,), role),
    )


_HY_V4: Config = {
    **{key: one for key, one in PLAIN.items() if key not in ("head_dim", "attention_bias")},
    "architectures": ["HYV4ForCausalLM"],
    "model_type": "hy_v4",
    "pad_token_id": 0,
    "num_key_value_heads": 8,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "indexer_types": ["full", "full", "shared"],
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 32,
    "hc_mult": 2,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_nextn_predict_layers": 1,
    **{key: SMALL[key] for key in LATENT},
    **EXPERTS,
}
EXAMPLES = {
    "hy_v4": Example(
        _HY_V4,
        vllm=Reader("HYV4MTP", needs_gpu=True, left=(".indexer.",)),
    ),
}
# Hy4-preview: the defaults of transformers' hy_v4, which are made for it.
RELEASES: Releases = {
    "hy_v4": {
        **PLAIN_GROUPS,
        "rms_norm_eps": (1e-5,),
        "hc_eps": (1e-6,),
        "norm_topk_prob": (True,),
        "routed_scaling_factor": (2.827,),
        "swiglu_limit": (10.0,),
    }
}
