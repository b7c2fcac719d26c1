"""Inkling: attention whose positions are biases by distance, most layers to the last tokens alone,
with short convolutions of keys, values and what layers add; experts that are stored fused, gate and
up rows in turns, and MTP layers with dense MLPs. Towers for images and sound stay as they are.

Source: transformers' inkling and its conversion mapping; vLLM's inkling, SGLang's inkling. vLLM
builds the MTP layers unquantized, and none of their matrices is a linear here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from mtp_checkpoints.families.base import Role
from mtp_checkpoints.families.contract import MtpContract
from mtp_checkpoints.families.engine_draft import SGLANG_UNQUANTIZED
from mtp_checkpoints.families.examples import PLAIN, Config, Example, Reader
from mtp_checkpoints.families.fields import Fields
from mtp_checkpoints.families.listed_decoder import listed_decoder
from mtp_checkpoints.families.moe_decoder import main_layers, mtp_count
from mtp_checkpoints.families.parts.feed_forward import Router
from mtp_checkpoints.families.parts.listed import Entry, Listed, matrix, norm
from mtp_checkpoints.families.releases import Releases, Values
from mtp_checkpoints.families.spec import Input, LayerSpec, ModelSpec, MtpModules, MtpSpec
from mtp_checkpoints.families.text_part import TextPart

_CONTRACT = MtpContract(source="transformers and vLLM: embeddings pass the main model's embed_norm")
_TOWERS = ("model.audio.", "model.visual.")
_MAIN, _MTP = "model.llm", "model.mtp"
_FULL, _SLIDING = "hybrid", "hybrid_sliding"
_MODULES = ("embed_norm", "hidden_norm", "input_proj")
_OF_SLIDING = ("num_attention_heads", "num_key_value_heads", "head_dim")


def spec(fields: Fields) -> ModelSpec:
    """Describe a config.json, with a text_config or of the text model alone."""
    part = replace(TextPart.whole(fields), prefix=_MAIN)
    if fields.has("text_config"):
        part = TextPart.of(fields, _MAIN, _TOWERS)
    text, own = _widths(part.fields), fields.section("mtp_config")
    main, count = main_layers(text), mtp_count(own)
    mixtures, mlp = _mixtures(text, main), _mlp(text)
    slides = [kind == _SLIDING for kind in _kinds(text, main)]
    layers = [
        _layer(text, f"{_MAIN}.layers.{index}", mixture or mlp, slides=slides[index])
        for index, mixture in enumerate(mixtures)
    ]
    local = own.wholes("local_layer_ids")
    mtp = [_mtp(text, own, index, slides=index in local) for index in range(count)]
    described = listed_decoder(
        part, layers, mtp, _CONTRACT, mtp_prefix=_MTP, sglang=SGLANG_UNQUANTIZED
    )
    return replace(
        described,
        embedding=f"{_MAIN}.embed",
        head=f"{_MAIN}.unembed",
        head_rows=text.without_nulls().whole("unpadded_vocab_size", described.facts.vocab),
        count_field=f"{own.prefix}num_nextn_predict_layers",
        more=_embedding_norm(text),
    )


def _widths(fields: Fields) -> Fields:
    """Return the fields with the inner sizes of experts and of dense layers by their usual names:
    releases call the former intermediate_size."""
    if not fields.has("dense_intermediate_size"):
        return fields
    return fields.with_values(
        moe_intermediate_size=fields.whole("intermediate_size"),
        intermediate_size=fields.whole("dense_intermediate_size"),
    )


def _kinds(fields: Fields, layers: int) -> list[str]:
    """Return the kinds of attention: as listed, by number, or all but every sixth sliding."""
    if fields.has("layer_types"):
        return [*fields.kinds("layer_types", (_FULL, _SLIDING), layers)]
    usual = [index for index in range(layers) if (index + 1) % 6]
    local = fields.wholes("local_layer_ids") if fields.has("local_layer_ids") else usual
    return [_SLIDING if index in local else _FULL for index in range(layers)]


def _mixtures(fields: Fields, layers: int) -> list[Listed | None]:
    """Return the mixture of each layer, None for a dense one."""
    experts = _experts(fields)
    if fields.has("mlp_layer_types"):
        kinds = fields.kinds("mlp_layer_types", ("dense", "sparse"), layers)
        return [experts if kind == "sparse" else None for kind in kinds]
    dense = fields.without_nulls().whole("dense_mlp_idx", 0, minimum=0)
    return [None if index < dense else experts for index in range(layers)]


def _layer(fields: Fields, prefix: str, second: Listed, *, slides: bool) -> LayerSpec:
    hidden, width = fields.whole("hidden_size"), _kernel(fields)
    return LayerSpec(
        prefix,
        _attention(fields, slides=slides),
        second,
        attention_name="attn",
        norms=("attn_norm", "mlp_norm"),
        more=tuple(_convolution(f"{one}_sconv", hidden, width) for one in ("attn", "mlp")),
    )


def _mtp(fields: Fields, own: Fields, index: int, *, slides: bool) -> MtpSpec:
    prefix, hidden = f"{_MTP}.layers.{index}", fields.whole("hidden_size")
    layer = _layer(fields, f"{prefix}.transformer_block", _mlp(fields), slides=slides)
    shared = own.flag("chain_hidden_post_norm", False) and index == 0  # one norm of all layers
    embedding_norm, hidden_norm, projection = (f"{prefix}.{name}" for name in _MODULES)
    return MtpSpec(
        replace(
            layer,
            attention=_unquantized(layer.attention),
            feed_forward=_unquantized(layer.feed_forward),
        ),
        MtpModules(None, embedding_norm, hidden_norm, projection, None, None),
        (Input.HIDDEN, Input.EMBEDDING),
        prefix,
        more=(norm(f"{_MTP}.chain_norm", hidden),) if shared else (),
    )


def _unquantized(part: object) -> Listed:
    """Return a part whose matrices no engine reads quantized."""
    assert isinstance(part, Listed)
    roles = {Role.ATTENTION: Role.MTP_INPUT, Role.DENSE_MLP: Role.MTP_INPUT}
    entries = (one._replace(role=roles.get(one.role, one.role)) for one in part.entries)
    return replace(part, entries=tuple(entries))


def _attention(fields: Fields, *, slides: bool) -> Listed:
    own = fields
    if slides:
        own = fields.with_values(**{key: fields.whole(f"swa_{key}") for key in _OF_SLIDING})
    hidden, heads, head = (own.whole(k) for k in ("hidden_size", "num_attention_heads", "head_dim"))
    keys, shapes, role = own.whole("num_key_value_heads") * head, own.whole("d_rel"), Role.ATTENTION
    extent = own.whole("sliding_window_size" if slides else "rel_extent")
    entries = (
        matrix("wq_du", heads * head, hidden, role),
        matrix("wk_dv", keys, hidden, role),
        matrix("wv_dv", keys, hidden, role),
        matrix("wr_du", heads * shapes, hidden, role),
        matrix("wo_ud", hidden, heads * head, role),
        norm("q_norm", head),
        norm("k_norm", head),
        *(_convolution(f"{one}_sconv", keys, _kernel(own)) for one in "kv"),
        Entry("rel_logits_proj.proj", (shapes, extent), Role.ATTENTION_GATES),
    )
    return Listed("attention with biases by distance", "attn", entries)


def _convolution(module: str, channels: int, width: int) -> Entry:
    return Entry(f"{module}.weight", (channels, 1, width), Role.CONVOLUTION)


def _kernel(fields: Fields) -> int:
    return fields.whole("sconv_kernel_size", fields.whole("conv_kernel_size", 4))


def _mlp(fields: Fields) -> Listed:
    hidden, inner = fields.whole("hidden_size"), fields.whole("intermediate_size")
    entries = (
        matrix("w13_dn", 2 * inner, hidden, Role.DENSE_MLP),
        matrix("w2_md", hidden, inner, Role.DENSE_MLP),
        *_scale(fields, "global_scale", Role.DENSE_MLP),
    )
    return Listed("an MLP with a scale", "mlp", entries)


def _experts(fields: Fields) -> Listed:
    hidden, inner = fields.whole("hidden_size"), fields.whole("moe_intermediate_size")
    experts, shared = fields.whole("n_routed_experts"), fields.whole("n_shared_experts")
    Router.of(fields, experts)  # refuses more than can be picked
    entries = [matrix("gate", experts + shared, hidden, Role.ROUTER)]
    if fields.flag("use_gate_bias", True):
        entries.append(Entry("gate.bias", (experts,), Role.ROUTER))
    entries += _scale(fields, "gate.global_scale", Role.ROUTER)
    for name, count, role in (
        ("experts.", experts, Role.ROUTED_EXPERT),
        ("shared_experts.shared_", shared, Role.SHARED_EXPERT),
    ):
        entries.append(Entry(f"{name}w13_weight", (count, 2 * inner, hidden), role))
        entries.append(Entry(f"{name}w2_weight", (count, hidden, inner), role))
    return Listed("experts whose shared ones take part in the softmax", "mlp", tuple(entries))


def _scale(fields: Fields, name: str, role: Role) -> Iterable[Entry]:
    return [Entry(name, (1,), role)] if fields.flag("use_global_scale", True) else []


def _embedding_norm(fields: Fields) -> tuple[Entry, ...]:
    has_one = fields.flag("use_embed_norm", True)
    return (norm(f"{_MAIN}.embed_norm", fields.whole("hidden_size")),) if has_one else ()


_INKLING_MODEL: Config = {
    **{
        key: one for key, one in PLAIN.items() if key not in ("intermediate_size", "attention_bias")
    },
    "architectures": ["InklingForConditionalGeneration"],
    "model_type": "inkling_model",
    "intermediate_size": 64,
    "dense_intermediate_size": 96,
    "dense_mlp_idx": 1,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_head_dim": 16,
    "sliding_window_size": 32,
    "local_layer_ids": [1, 2],
    "d_rel": 4,
    "rel_extent": 64,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "mtp_config": {
        "num_nextn_predict_layers": 2,
        "local_layer_ids": [1],
        "chain_hidden_post_norm": True,
    },
}
_OF_WHOLE = ("architectures", "mtp_config")
_INKLING_MM_MODEL: Config = {
    "architectures": ["InklingForConditionalGeneration"],
    "model_type": "inkling_mm_model",
    "mtp_config": _INKLING_MODEL["mtp_config"],
    "text_config": {key: one for key, one in _INKLING_MODEL.items() if key not in _OF_WHOLE}
    | {"model_type": "inkling_text"},
    "vision_config": {"patch_size": 2, "num_hidden_layers": 3, "hidden_size": 32},
    "audio_config": {"n_mel_bins": 4, "mel_vocab_size": 8},
}
EXAMPLES = {
    "inkling_mm_model": Example(
        _INKLING_MM_MODEL,
        mtp_model={},
        vllm=Reader("InklingMTP", {"use_global_scale": True}, needs_gpu=True),
    ),
    "inkling_model": Example(
        _INKLING_MODEL,
        in_transformers=False,
        vllm=Reader(
            "InklingMTP",
            {"use_global_scale": True, "architectures": ["InklingForCausalLM"]},
            needs_gpu=True,
        ),
        vllm_main=Reader(
            "InklingForCausalLM",
            {"shared_expert_sink": True, "use_global_scale": True, "use_embed_norm": True}
            | {"n_routed_experts": 14}
            | {"architectures": ["InklingForCausalLM"]},
            needs_gpu=True,
            left=(".gate.bias",),
        ),
    ),
}
# Inkling and Inkling-Small: config.json in tests of engines, and the defaults of transformers'
# inkling, which are made for the first.
_VALUES: Values = {
    "rms_norm_eps": (1e-6,),
    "rms_norm_eps_moe_gate": (1e-6,),
    "logits_mup_width_multiplier": (24.0, 16.0),
    "route_scale": (8.0,),
    "log_scaling_n_floor": (128000,),
    "log_scaling_alpha": (0.1,),
}
RELEASES: Releases = {"inkling_mm_model": _VALUES, "inkling_model": _VALUES}
