"""Step-3.5: gates of attention heads, of which sliding layers have more, a mixture of experts that
are stored fused, and MTP layers with a head each.

Source: transformers' step3p7 and its conversion mapping; vLLM's and SGLang's step3p5_mtp.
"""

from __future__ import annotations

from dataclasses import replace

from mtp_checkpoints.families.base import Role
from mtp_checkpoints.families.contract import Hidden, MtpContract
from mtp_checkpoints.families.facts import refuse_set
from mtp_checkpoints.families.fields import Fields
from mtp_checkpoints.families.listed_decoder import listed_decoder, listed_layer
from mtp_checkpoints.families.moe_decoder import main_layers, mtp_count
from mtp_checkpoints.families.parts.listed import Entry, Listed, gated_mlp, grouped, matrix, norm
from mtp_checkpoints.families.spec import LayerSpec, ModelSpec, MtpModules, MtpSpec
from mtp_checkpoints.families.text_part import TextPart

_CONTRACT = MtpContract(
    Hidden.BEFORE_NORM, recycled_hidden=Hidden.BEFORE_NORM, source="vLLM and SGLang"
)
_SLIDING, _FULL = "sliding_attention", "full_attention"
_ATTENTION = "attention with a gate per head, in some layers to the last tokens alone"
_EXPERTS = "fused experts behind a sigmoid router"


def spec(fields: Fields) -> ModelSpec:
    """Describe a config.json."""
    return decoder(TextPart.whole(fields))


def decoder(part: TextPart) -> ModelSpec:
    """Describe the decoder of a config.json."""
    fields = part.fields
    refuse_set(fields, "tie_word_embeddings")
    main, count = main_layers(fields), mtp_count(fields)
    kinds = _kinds(fields, main + count)
    sparse = _sparse(fields, main)
    layers = [_layer(fields, index, kinds[index], sparse) for index in range(main + count)]
    described = listed_decoder(
        part,
        layers[:main],
        [_mtp(fields, layer) for layer in layers[main:]],
        _CONTRACT,
    )
    return replace(described, facts=replace(described.facts, norm_offset=1.0))


def _layer(fields: Fields, index: int, kind: str, sparse: frozenset[int]) -> LayerSpec:
    parts = _attention(fields, kind), _moe(fields) if index in sparse else _mlp(fields)
    return listed_layer(f"model.layers.{index}", *parts)


def _mtp(fields: Fields, layer: LayerSpec) -> MtpSpec:
    """Return an MTP layer: its head is its own, and no copy of the main model's."""
    prefix, hidden = layer.prefix, fields.whole("hidden_size")
    head = "transformer.shared_head"
    modules = MtpModules.without_copies(prefix, ("enorm", "hnorm", "eh_proj", f"{head}.norm"))
    own = Entry(
        f"{prefix}.{head}.output.weight", (fields.whole("vocab_size"), hidden), Role.OWN_HEAD
    )
    return MtpSpec(layer, modules, more=(own,))


def _kinds(fields: Fields, layers: int) -> list[str]:
    """Return the kinds of attention of main layers and MTP layers."""
    if not fields.has("layer_types"):
        return [_FULL] * layers
    return list(fields.kinds("layer_types", (_SLIDING, _FULL), layers))


def _sparse(fields: Fields, main: int) -> frozenset[int]:
    """Return the main layers with experts: as listed, or all but the first three."""
    key = "moe_layers_enum"
    if not fields.has(key):
        return frozenset(range(3, main))
    numbers = fields.word(key).split(",")
    if not all(number.strip().isdecimal() and len(number) < 8 for number in numbers):
        raise fields.unusable(key, "numbers of layers with commas between them")
    return frozenset(map(int, numbers))


def _attention(fields: Fields, kind: str) -> Listed:
    sizes = fields
    other = fields.section("attention_other_setting")
    if other.values and kind == other.word("attention_type", _SLIDING):
        sizes = other
    hidden = fields.whole("hidden_size")
    heads, groups = sizes.whole("num_attention_heads"), sizes.whole("num_attention_groups")
    head = sizes.whole("head_dim")
    entries = [*grouped(hidden, heads, groups, head), norm("q_norm", head), norm("k_norm", head)]
    if fields.flag("use_head_wise_attn_gate", True):
        entries.append(matrix("g_proj", heads, hidden, Role.ATTENTION))
    return Listed(_ATTENTION, "self_attn", tuple(entries))


def _mlp(fields: Fields) -> Listed:
    sizes = fields.whole("hidden_size"), fields.whole("intermediate_size")
    return Listed("gated MLP", "mlp", gated_mlp("", *sizes, Role.DENSE_MLP))


def _moe(fields: Fields) -> Listed:
    hidden, experts = fields.whole("hidden_size"), fields.whole("moe_num_experts")
    inner, shared = fields.whole("moe_intermediate_size"), fields.whole("share_expert_dim")
    routed = Role.ROUTED_EXPERT
    return Listed(
        _EXPERTS,
        "",
        (
            matrix("moe.gate", experts, hidden, Role.ROUTER),
            Entry("moe.router_bias", (experts,), Role.ROUTER),
            Entry("moe.gate_proj.weight", (experts, inner, hidden), routed),
            Entry("moe.up_proj.weight", (experts, inner, hidden), routed),
            Entry("moe.down_proj.weight", (experts, hidden, inner), routed),
            *gated_mlp("share_expert.", hidden, shared, Role.SHARED_EXPERT),
        ),
    )
