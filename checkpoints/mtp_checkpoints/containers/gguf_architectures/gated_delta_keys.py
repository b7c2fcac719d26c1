"""Keys and fields of models of gated delta nets with attention of gated heads in between, which
qwen35, qwen35moe and qwen3next have in common."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from mtp_checkpoints.containers.gguf_architectures.base import GROUPED
from mtp_checkpoints.containers.gguf_architectures.keys_read import (
    KeyReader,
    rope_fields,
    special_tokens,
)
from mtp_checkpoints.containers.gguf_architectures.keys_written import grouped_keys
from mtp_checkpoints.containers.gguf_forms import OFFSET_NORM, Form, forms_by_kind, forms_in_turns
from mtp_checkpoints.containers.gguf_values import Keys, Scalar, Value, f32, i32s, u32
from mtp_checkpoints.errors import InvalidInputError, UnsupportedError
from mtp_checkpoints.families.parts.feed_forward import GatedMlp, Moe
from mtp_checkpoints.families.parts.gated_delta import GatedDeltaNet
from mtp_checkpoints.families.parts.gqa import Gqa
from mtp_checkpoints.families.spec import LayerSpec, ModelSpec
from mtp_kernels.sizes import DeltaSizes

_LINEAR, _FULL = "linear_attention", "full_attention"
RECURRENT = "attention.recurrent_layers"
SECTIONS = "rope.dimension_sections"
_SECTION_COUNT = 4  # of which text models use three
_PERIOD = 4  # of layers with attention, usually
_MOST_HEADS = 1 << 16
_MOST_LAYERS = 1 << 16

GATED: Mapping[str, str] = {
    **{name: own for name, own in GROUPED.items() if "shared_experts" not in name},
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}
FLAT: Mapping[str, str] = {
    **GATED,
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
}
INTERLEAVED: Mapping[str, str] = {
    **GATED,
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_ba": "ssm_ba",
}
_OFFSET_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "self_attn.q_norm",
    "self_attn.k_norm",
    "enorm",
    "hnorm",
    "shared_head.norm",
    "model.norm",
)


def flat_forms(keys: Keys, name: str) -> dict[str, Form]:
    """Return the forms of a model whose projections are flat."""
    sizes = delta_sizes(KeyReader(keys, name))
    return {**dict.fromkeys(_OFFSET_NORMS, OFFSET_NORM), **forms_in_turns(sizes)}


def interleaved_forms(keys: Keys, name: str) -> dict[str, Form]:
    """Return the forms of a model whose projections have the rows of each key head together."""
    sizes = delta_sizes(KeyReader(keys, name))
    return {**dict.fromkeys(_OFFSET_NORMS, OFFSET_NORM), **forms_by_kind(sizes)}


def is_recurrent(layer: LayerSpec) -> bool:
    """Return whether a layer has a gated delta net."""
    return isinstance(layer.attention, GatedDeltaNet)


def gated_delta_keys(spec: ModelSpec) -> Iterator[tuple[str, Value]]:
    """Yield the keys of a model (UnsupportedError for sizes and positions that none tells)."""
    facts, recurrent = spec.facts, [is_recurrent(layer) for layer in spec.layers]
    yield "context_length", u32(facts.max_positions)
    yield "embedding_length", u32(facts.hidden)
    yield "vocab_size", u32(facts.vocab)
    yield "attention.layer_norm_rms_epsilon", f32(facts.norm_eps)
    for part in dict.fromkeys(layer.attention for layer in spec.layers):
        if isinstance(part, GatedDeltaNet):
            yield from _delta_keys(part.sizes)
        elif isinstance(part, Gqa):
            yield from grouped_keys(part)
            if part.rope.sections:
                padded = (*part.rope.sections, *([0] * _SECTION_COUNT))[:_SECTION_COUNT]
                yield SECTIONS, i32s(padded)
    yield "full_attention_interval", u32(recurrent.index(False) + 1 if False in recurrent else 0)
    feed_forward = spec.layers[0].feed_forward
    if isinstance(feed_forward, GatedMlp):
        yield "feed_forward_length", u32(feed_forward.inner)
    elif isinstance(feed_forward, Moe):
        yield "expert_count", u32(feed_forward.experts)
        yield "expert_used_count", u32(feed_forward.router.routing.experts_per_token)
        yield "expert_feed_forward_length", u32(feed_forward.expert.inner)
        shared = feed_forward.shared_inner or feed_forward.expert.inner
        yield "expert_shared_feed_forward_length", u32(shared)


def _delta_keys(sizes: DeltaSizes) -> Iterator[tuple[str, Value]]:
    if sizes.key != sizes.value:
        raise UnsupportedError(
            "llama.cpp has one size for the keys and values of a gated delta net",
            expected=f"linear_value_head_dim {sizes.key}, as linear_key_head_dim",
            found=sizes.value,
            todo="Use --target hf",
        )
    yield "ssm.conv_kernel", u32(sizes.width)
    yield "ssm.state_size", u32(sizes.key)
    yield "ssm.group_count", u32(sizes.key_heads)
    yield "ssm.time_step_rank", u32(sizes.value_heads)
    yield "ssm.inner_size", u32(sizes.output)


def delta_sizes(reader: KeyReader) -> DeltaSizes:
    """Return the sizes of a model's gated delta nets by its keys (InvalidInputError)."""
    key = reader.whole("ssm.state_size")
    sizes = DeltaSizes(
        reader.whole("ssm.group_count"),
        reader.whole("ssm.time_step_rank"),
        key=key,
        value=key,
        width=reader.whole("ssm.conv_kernel"),
    )
    if not 0 < sizes.key_heads <= sizes.value_heads < _MOST_HEADS or sizes.value_heads % (
        sizes.key_heads
    ):
        raise InvalidInputError(
            "The GGUF file's value heads do not fall into groups that share a key head",
            expected="ssm.time_step_rank divisible by ssm.group_count",
            found=f"{sizes.value_heads} and {sizes.key_heads}",
            todo="Get the file again from its source, or another one of the same model",
        )
    return sizes


def gated_delta_fields(reader: KeyReader, names: Collection[str]) -> dict[str, Any]:
    """Return the fields of a model; names: those of the file's tensors."""
    modules, sizes = reader.whole("nextn_predict_layers", 0), delta_sizes(reader)
    layers = reader.whole("block_count") - modules
    return {
        "vocab_size": reader.vocabulary,
        "hidden_size": reader.whole("embedding_length"),
        "num_hidden_layers": layers,
        "mtp_num_hidden_layers": modules,
        "max_position_embeddings": reader.whole("context_length"),
        "rms_norm_eps": reader.number("attention.layer_norm_rms_epsilon"),
        "num_attention_heads": reader.whole("attention.head_count"),
        "num_key_value_heads": reader.whole("attention.head_count_kv"),
        "head_dim": reader.whole("attention.key_length"),
        "linear_num_key_heads": sizes.key_heads,
        "linear_num_value_heads": sizes.value_heads,
        "linear_key_head_dim": sizes.key,
        "linear_value_head_dim": sizes.value,
        "linear_conv_kernel_dim": sizes.width,
        "layer_types": _layer_types(reader, layers),
        "rope_parameters": _rope(reader),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in names,
        **special_tokens(reader.keys),
    }


def _layer_types(reader: KeyReader, layers: int) -> list[str]:
    period = reader.whole("full_attention_interval", _PERIOD)
    recurrent: Iterable[Scalar] = reader.numbers(RECURRENT) or (
        (number + 1) % max(1, period) != 0 for number in range(layers)
    )
    counted = max(0, min(layers, _MOST_LAYERS))  # whoever reads the fields refuses other counts
    return [_LINEAR if one else _FULL for one in islice(recurrent, counted)]


def _rope(reader: KeyReader) -> dict[str, Any]:
    head, turned = reader.whole("attention.key_length"), reader.whole("rope.dimension_count")
    sections = [number for number in reader.numbers(SECTIONS) if number]
    return {
        "rope_type": "default",
        **rope_fields(reader),
        "partial_rotary_factor": turned / head if head else 0.0,
        **({"mrope_section": sections} if sections else {}),
    }


def expert_fields(reader: KeyReader) -> dict[str, Any]:
    """Return the fields of Qwen's experts."""
    return {
        "num_experts": reader.whole("expert_count"),
        "num_experts_per_tok": reader.whole("expert_used_count"),
        "moe_intermediate_size": reader.whole("expert_feed_forward_length"),
        "shared_expert_intermediate_size": reader.whole("expert_shared_feed_forward_length"),
    }
