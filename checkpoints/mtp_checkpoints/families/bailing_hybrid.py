"""Ling-3.0: delta attention with gates per channel, latent attention in every sixth layer, a
mixture of experts behind a sigmoid router, and an MTP layer with latent attention behind the last.

Source: transformers' bailing_hybrid and its conversion mapping; vLLM's bailing_moe_v3_mtp.
Ling-2.5, of the same model_type, has other layers.
"""

from __future__ import annotations

from dataclasses import replace

from mtp_checkpoints.errors import UnsupportedError
from mtp_checkpoints.families.base import Role, TensorMaker
from mtp_checkpoints.families.contract import MtpContract
from mtp_checkpoints.families.facts import ModelFacts, refuse_set
from mtp_checkpoints.families.fields import Fields
from mtp_checkpoints.families.listed_decoder import listed_decoder
from mtp_checkpoints.families.moe_decoder import check_expert_count, main_layers, mtp_count
from mtp_checkpoints.families.parts.feed_forward import GatedMlp, Moe, MoeNames
from mtp_checkpoints.families.parts.listed import Entry, Listed, matrix, norm
from mtp_checkpoints.families.parts.mla import Mla
from mtp_checkpoints.families.spec import LayerSpec, ModelSpec, MtpModules, MtpSpec
from mtp_checkpoints.families.text_part import TextPart

_CONTRACT = MtpContract(source="vLLM")
_NAMES = MoeNames(bias="gate.expert_bias")
_FIELDS = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}
_FULL, _LINEAR = "full_attention", "linear_attention"
_ATTENTION = "attention"


def spec(fields: Fields) -> ModelSpec:
    """Describe a config.json."""
    _refuse_other(fields)
    known = fields.named(**_FIELDS).with_defaults(n_shared_experts=1)
    main, count = main_layers(known), mtp_count(known)
    dense = known.whole("first_k_dense_replace", 2, minimum=0)
    check_expert_count(known, "n_routed_experts", main + count)
    attentions = {_FULL: _latent(known), _LINEAR: _delta(known)}
    moe, mlp = Moe.of(known, _NAMES), GatedMlp.of(known)
    layers = [
        LayerSpec(
            f"model.layers.{index}",
            attentions[kind],
            mlp if index < dense else moe,
            attention_name=_ATTENTION,
        )
        for index, kind in enumerate([*_kinds(known, main), *[_FULL] * count])
    ]
    mtp = [
        MtpSpec(replace(layer, feed_forward=moe), MtpModules.with_last_norm(layer.prefix))
        for layer in layers[main:]
    ]
    described = listed_decoder(TextPart.whole(known), layers[:main], mtp, _CONTRACT)
    return replace(described, embedding="model.word_embeddings")


def _refuse_other(fields: Fields) -> None:
    refuse_set(fields, "tie_word_embeddings")
    names = fields.values.get("architectures")
    if isinstance(names, list) and "BailingMoeV2_5ForCausalLM" in names:
        raise UnsupportedError(
            "Ling-2.5 has other layers than Ling-3.0, which has the same model_type",
            expected="BailingMoeV3ForCausalLM",
            found="BailingMoeV2_5ForCausalLM",
        )


def _kinds(fields: Fields, layers: int) -> list[str]:
    """Return the kind of every main layer's attention: as listed, or by a period."""
    if fields.has("layer_types"):
        return [*fields.kinds("layer_types", (_LINEAR, _FULL), layers)]
    period = fields.whole("layer_group_size", 6)
    return [_LINEAR if (index + 1) % period else _FULL for index in range(layers)]


def _latent(fields: Fields) -> Listed:
    """Return latent attention with a gate per head, whose last projection has a name of its own."""
    attention, make = Mla.of(fields), TensorMaker(ModelFacts.of(fields).dtype)
    entries = [
        Entry(one.name.removeprefix("-.").replace("o_proj", "dense"), one.shape, one.role)
        for one in attention.tensors("-", make)
    ]
    gate = matrix("g_proj", attention.sizes.heads, attention.hidden, Role.DELTA_GATES)
    return Listed("latent attention with a gate per head", _ATTENTION, (*entries, gate))


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
    return Listed("delta attention with gates per channel", _ATTENTION, tuple(entries))
