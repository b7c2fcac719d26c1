"""Step-3.5: gates of attention heads, of which sliding layers have more, a mixture of experts that
are stored fused, and MTP layers with a head each.

Source: transformers' step3p7 and its conversion mapping; vLLM's step3p5 and step3p5_mtp; SGLang's
step3p5_mtp.
"""

from __future__ import annotations

from dataclasses import replace

from mtp_checkpoints.families.base import Role
from mtp_checkpoints.families.contract import Hidden, MtpContract
from mtp_checkpoints.families.engine_draft import SGLANG_UNQUANTIZED, EngineDraft
from mtp_checkpoints.families.examples import STEP3P5, Config, Example, Reader
from mtp_checkpoints.families.facts import refuse_set
from mtp_checkpoints.families.fields import Fields
from mtp_checkpoints.families.listed_decoder import listed_decoder
from mtp_checkpoints.families.moe_decoder import main_layers, mtp_count
from mtp_checkpoints.families.parts.feed_forward import (
    FusedExperts,
    GatedMlp,
    Moe,
    MoeNames,
    Router,
)
from mtp_checkpoints.families.parts.gqa import Gqa
from mtp_checkpoints.families.parts.head_gated_gqa import HeadGatedGqa
from mtp_checkpoints.families.parts.listed import Entry
from mtp_checkpoints.families.parts.sliding_gqa import SlidingGqa
from mtp_checkpoints.families.releases import Releases
from mtp_checkpoints.families.spec import LayerSpec, ModelSpec, MtpModules, MtpSpec
from mtp_checkpoints.families.text_part import TextPart

_CONTRACT = MtpContract(
    Hidden.BEFORE_NORM, recycled_hidden=Hidden.BEFORE_NORM, source="vLLM and SGLang"
)
_EMBEDDING = "model.mtp.embed_tokens"  # a copy for all layers
_SLIDING, _FULL = "sliding_attention", "full_attention"
_FIELDS = {
    "num_key_value_heads": "num_attention_groups",
    "partial_rotary_factor": "partial_rotary_factors",
    "num_experts_per_tok": "moe_top_k",
    "norm_topk_prob": "norm_expert_weight",
    "routed_scaling_factor": "moe_router_scaling_factor",
    "scoring_func": "moe_router_activation",
}
_OF_LAYERS = ("rope_theta", "partial_rotary_factor", "swiglu_limits", "swiglu_limits_shared")
_NAMES = MoeNames(
    router="moe.gate",
    bias="moe.router_bias",
    shared="share_expert",
    module="",
    fused=FusedExperts(("moe.gate_proj.weight", "moe.up_proj.weight"), "moe.down_proj.weight"),
    takes_fused=("sglang",),
    experts="moe.experts",
)

_VLLM_MODULES = tuple(
    (f"{module}.", f"mtp_block.{module}.") for module in ("self_attn", "mlp", "moe", "share_expert")
)


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
        [_mtp(fields, layer, is_first=not number) for number, layer in enumerate(layers[main:])],
        _CONTRACT,
        vllm=EngineDraft(modules=_VLLM_MODULES),
        sglang=SGLANG_UNQUANTIZED,
    )
    facts = replace(described.facts, norm_offset=1.0)
    return replace(described, facts=facts, may_fuse=True)


def _layer(fields: Fields, index: int, kind: str, sparse: frozenset[int]) -> LayerSpec:
    own = fields.named(**_FIELDS).at(index, *_OF_LAYERS)
    prefix, attention = f"model.layers.{index}", _attention(own, index, kind)
    if index in sparse:
        return LayerSpec(prefix, attention, _moe(own), feed_forward_name=_NAMES.module)
    return LayerSpec(prefix, attention, replace(GatedMlp.of(own), limit=_limit(own, shared=True)))


def _mtp(fields: Fields, layer: LayerSpec, *, is_first: bool) -> MtpSpec:
    """Return an MTP layer: its head is its own, and no copy of the main model's. Both engines take
    the embedding from the draft's folder, under any name that says so, and fail without it."""
    prefix, hidden = layer.prefix, fields.whole("hidden_size")
    head = "transformer.shared_head"
    modules = MtpModules.without_copies(prefix, ("enorm", "hnorm", "eh_proj", f"{head}.norm"))
    if is_first:
        modules = modules._replace(embedding=_EMBEDDING)
    own = Entry(
        f"{prefix}.{head}.output.weight", (fields.whole("vocab_size"), hidden), Role.OWN_HEAD
    )
    return MtpSpec(layer, modules, more=(own,))


def _kinds(fields: Fields, layers: int) -> list[str]:
    """Return the kinds of attention of main layers and MTP layers; a config.json that counts none
    of these may list them still."""
    if not fields.has("layer_types"):
        return [_FULL] * layers
    listed = fields.values["layer_types"]
    if not mtp_count(fields) and isinstance(listed, list):
        fields = fields.with_values(layer_types=listed[:layers])
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


def _attention(fields: Fields, index: int, kind: str) -> Gqa:
    """Read the attention of a layer: those of one kind have other heads."""
    known = fields.with_defaults(use_qk_norm=True, partial_rotary_factor=1.0)
    other = fields.section("attention_other_setting")
    if other.values and kind == other.word("attention_type", _SLIDING):
        known = known.with_values(
            num_attention_heads=other.whole("num_attention_heads"),
            num_key_value_heads=other.whole("num_attention_groups"),
            head_dim=other.whole("head_dim"),
        )
    stretched = fields.values.get("yarn_only_types") or [kind]
    if not isinstance(stretched, list):
        raise fields.unusable("yarn_only_types", "a list of kinds of attention")
    if kind not in stretched:
        known = known.with_values(rope_scaling=None)
    whole = Gqa.of(known)
    placed = fields.at(index, "use_rope_layers")
    if placed.has("use_rope_layers") and not placed.flag("use_rope_layers"):
        whole = whole.without_positions()
    window = fields.whole("sliding_window") if kind == _SLIDING else None
    if fields.flag("use_head_wise_attn_gate", True):
        return HeadGatedGqa(whole.hidden, whole.sizes, whole.rope, window)
    return whole if window is None else SlidingGqa(whole.hidden, whole.sizes, whole.rope, window)


def _limit(fields: Fields, *, shared: bool) -> float | None:
    """Return the bound of a layer's inner values, of routed experts or of others; 0 is none."""
    key = "swiglu_limits_shared" if shared else "swiglu_limits"
    return fields.number(key, 0.0, maximum=1e6) or None


def _moe(fields: Fields) -> Moe:
    experts, inner = fields.whole("moe_num_experts"), fields.whole("moe_intermediate_size")
    return Moe(
        replace(GatedMlp.of(fields), inner=inner, limit=_limit(fields, shared=False)),
        experts,
        shared=1,
        router=Router.of(fields, experts),
        shared_inner=fields.whole("share_expert_dim"),
        is_fused=True,
        names=_NAMES,
        shared_limit=_limit(fields, shared=True),
    )


_KINDS = 46  # SGLang takes the kind of layer 45 for any module
SGLANG_FIELDS: Config = (
    {"layer_types": ["sliding_attention"] * _KINDS, "rope_theta": [1e4] * _KINDS}
    | {"partial_rotary_factors": [1.0] * _KINDS, "swiglu_limits_shared": None}
    | {"rope_scaling": None, "yarn_only_types": []}
)


EXAMPLES = {
    "step3p5": Example(
        STEP3P5,
        mtp_model={
            "mtp_layer_types": ["sliding_attention"] * 3,
            "mtp_mlp_layer_types": ["dense"] * 3,
            "mtp_per_layer_config": {number: {"num_attention_heads": 12} for number in range(3)},
        },
        sglang=Reader("Step3p5MTP", SGLANG_FIELDS, module="step3p5_mtp", layers=3),
    ),
}
# Step-3.5-Flash, bases of full and sliding attention: its config.json as the page of it in
# weavers.neocities.org/architecture-encyclopedia lists it.
RELEASES: Releases = {
    "step3p5": {
        "rms_norm_eps": (1e-5,),
        "rope_theta": (5e6, 10000.0),
        "sliding_window": (512,),
    }
}
