"""Qwen3.8-Flash-Next: gated delta nets, in every fourth layer gated attention to the tokens that an
indexer picks, experts, and several streams that every part reads and writes by hyper-connections;
an MTP module of the same kind adds the embedding to each stream. Embeddings of n-grams, which some
layers read, are carried as they are.

Source: transformers' qwen4_exp; vLLM's qwen4_exp.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from mtp_checkpoints.families.base import Role
from mtp_checkpoints.families.contract import Hidden, MtpContract
from mtp_checkpoints.families.engine_draft import SGLANG_OWN_NAMES
from mtp_checkpoints.families.examples import (
    OF_NEXT_ALONE,
    QWEN3_NEXT,
    Config,
    Example,
    Reader,
    with_vision,
)
from mtp_checkpoints.families.facts import refuse_set
from mtp_checkpoints.families.fields import Fields
from mtp_checkpoints.families.gated_delta_decoder import at_most_one_mtp_layer
from mtp_checkpoints.families.listed_decoder import listed_decoder
from mtp_checkpoints.families.moe_decoder import check_expert_count, main_layers
from mtp_checkpoints.families.parts.feed_forward import Moe
from mtp_checkpoints.families.parts.gated_delta import GatedDeltaNet
from mtp_checkpoints.families.parts.listed import Entry, Listed, grouped, matrix, norm
from mtp_checkpoints.families.releases import Releases, Values
from mtp_checkpoints.families.spec import LayerSpec, ModelSpec, MtpModules, MtpSpec
from mtp_checkpoints.families.text_part import TextPart

_CONTRACT = MtpContract(
    Hidden.BEFORE_NORM, recycled_hidden=Hidden.BEFORE_NORM, source="vLLM: all streams"
)
_LINEAR, _FULL, _INDEXED = "linear_attention", "full_attention", "indexed_attention"
_INPUTS = ("fc_embedding", "fc_hidden")


def spec(fields: Fields) -> ModelSpec:
    """Describe a config.json with a text_config, whose experts are stored fused."""
    return _decoder(TextPart.of(fields), is_fused=True)


def text_spec(fields: Fields) -> ModelSpec:
    """Describe a config.json of the text model alone, as transformers saves it."""
    return _decoder(TextPart.whole(fields), is_fused=False)


def _decoder(part: TextPart, *, is_fused: bool) -> ModelSpec:
    fields = part.fields.with_defaults(head_dim=256)
    refuse_set(fields, "attention_bias")
    main, count = main_layers(fields), at_most_one_mtp_layer(fields, 0)
    check_expert_count(fields, "num_experts", main + count)
    moe = replace(Moe.gated(fields, normalises=True), is_fused=is_fused)
    delta, attention = GatedDeltaNet.of(fields, is_interleaved=False), _attention(fields)
    streams = _streams(fields, ("attn_hyper_connection", "mlp_hyper_connection"))

    def layer(prefix: str, *, is_linear: bool) -> LayerSpec:
        own, name = (delta, "linear_attn") if is_linear else (attention, attention.name)
        return LayerSpec(prefix, own, moe, name, norms=(), more=streams)

    kinds = _kinds(fields, main)
    layers = [
        layer(f"{part.prefix}.layers.{index}", is_linear=kind == _LINEAR)
        for index, kind in enumerate(kinds)
    ]
    hidden = fields.whole("hidden_size")
    module = MtpSpec(
        layer("mtp.layers.0", is_linear=False),
        MtpModules(None, "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", None, None, None),
        prefix="mtp",
        hidden_width=hidden * fields.whole("hc_count", 4),
        more=(
            *(matrix(f"mtp.{name}", hidden, hidden, Role.MTP_INPUT) for name in _INPUTS),
            *_mixer(fields, "mtp"),
        ),
    )
    described = listed_decoder(
        part, layers, [module] * count, _CONTRACT, mtp_prefix="mtp", sglang=SGLANG_OWN_NAMES
    )
    return replace(
        described,
        facts=replace(described.facts, norm_offset=1.0),
        norm="",
        more=_mixer(fields, part.prefix),
        may_fuse=True,
        carried=(*described.carried, *_of_ngrams(fields, part.prefix, main)),
    )


def _kinds(fields: Fields, layers: int) -> list[str]:
    if fields.has("layer_types"):
        return [*fields.kinds("layer_types", (_LINEAR, _FULL, _INDEXED), layers)]
    period = fields.without_nulls().whole("full_attention_interval", 4)
    return [_LINEAR if (index + 1) % period else _FULL for index in range(layers)]


def _attention(fields: Fields) -> Listed:
    """Return attention with gated heads, and its indexer."""
    hidden, head = fields.whole("hidden_size"), fields.whole("head_dim")
    heads, kv_heads = fields.whole("num_attention_heads"), fields.whole("num_key_value_heads")
    query, *others = grouped(hidden, heads, kv_heads, head)
    own = fields.whole("indexer_head_dim")
    rows = (fields.whole("indexer_n_heads") + fields.whole("indexer_kv_heads", 1)) * own
    return Listed(
        "gated attention of picked tokens",
        "self_attn",
        (
            query._replace(shape=(2 * heads * head, hidden)),
            *others,
            norm("q_norm", head),
            norm("k_norm", head),
            matrix("indexer.index_qk_proj", rows, hidden, Role.INDEXER_HEADS),
            norm("indexer.q_layernorm", own),
            norm("indexer.k_layernorm", own),
        ),
    )


def _streams(fields: Fields, names: Iterable[str]) -> tuple[Entry, ...]:
    """Return the hyper-connections of a layer, each with what it writes back."""
    streams, hidden = fields.whole("hc_count", 4), fields.whole("hidden_size")
    role = Role.HYPER_CONNECTION
    return tuple(
        entry
        for name in names
        for entry in (
            *_reading(fields, name),
            matrix(f"{name}.block_inject_weight", streams, streams * hidden, role),
        )
    )


def _mixer(fields: Fields, prefix: str) -> tuple[Entry, ...]:
    """Return what makes one stream of all, before the head."""
    return _reading(fields, f"{prefix}.hyper_connection_mixer")


def _reading(fields: Fields, name: str) -> tuple[Entry, ...]:
    width = fields.whole("hc_count", 4) * fields.whole("hidden_size")
    rank, role = fields.whole("hc_lowrank", 320), Role.HYPER_CONNECTION
    return (
        norm(f"{name}.hc_norm", width),
        matrix(f"{name}.input_mix_weight_down", rank, width, role),
        matrix(f"{name}.input_mix_weight_up", width, rank, role),
    )


def _of_ngrams(fields: Fields, prefix: str, layers: int) -> tuple[str, ...]:
    """Return what names of tensors of n-grams begin with; layers are counted from 1."""
    listed = fields.values.get("ple_layer_ids") or []
    if not isinstance(listed, list) or not all(type(n) is int and 0 < n <= layers for n in listed):
        raise fields.unusable("ple_layer_ids", f"numbers of layers, from 1 to {layers}")
    return tuple(f"{prefix}.layers.{number - 1}.ple." for number in sorted(set(listed)))


_QWEN4_EXP_TEXT: Config = {
    **{key: value for key, value in QWEN3_NEXT.items() if key not in OF_NEXT_ALONE},
    "architectures": ["Qwen4ExpForCausalLM"],
    "model_type": "qwen4_exp_text",
    "pad_token_id": 0,
    "hc_count": 2,
    "hc_lowrank": 16,
    "ple_layer_ids": [1],
    "ple_embed_dim": 32,
    "ngram_vocab_size_base": 50,
    "make_ngram_vocab_size_divisible_by": 8,
    "split_ngram_parts": 4,
    "heads_per_ngram": 2,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 32,
    "indexer_budget": 64,
    "indexer_compress_ratio": 16,
    "mtp_num_hidden_layers": 1,
}
del _QWEN4_EXP_TEXT["partial_rotary_factor"]
_QWEN4_EXP = with_vision("qwen4_exp", "Qwen4ExpForConditionalGeneration", _QWEN4_EXP_TEXT)


EXAMPLES = {
    "qwen4_exp": Example(
        _QWEN4_EXP,  # vLLM fills matrices up to multiples of 16 rows: these have none to fill.
        vllm=Reader("Qwen4ExpMTP", {"hc_lowrank": 14}, needs_gpu=True),
    ),
    "qwen4_exp_text": Example(
        _QWEN4_EXP_TEXT,
        vllm=Reader("Qwen4ExpMTP", {"hc_lowrank": 14}, needs_gpu=True),
    ),
}
# Qwen3.8-Flash-Next: its config.json in a test of mtplx.
_VALUES: Values = {
    "rms_norm_eps": (1e-6,),
    "rope_theta": (1e7,),
    "partial_rotary_factor": (0.25,),
}
RELEASES: Releases = {"qwen4_exp": _VALUES, "qwen4_exp_text": _VALUES}
