"""Mellum2: grouped-query attention with norms of queries and keys, in most layers to the last
tokens alone, a mixture of experts behind a softmax router, and an MTP layer of the same kind.

Source: transformers' mellum and its mapping of the MTP module.
"""

from __future__ import annotations

from dataclasses import replace

from mtp_checkpoints.families.contract import MtpContract
from mtp_checkpoints.families.fields import Fields
from mtp_checkpoints.families.gated_delta_decoder import at_most_one_mtp_layer
from mtp_checkpoints.families.listed_decoder import listed_decoder
from mtp_checkpoints.families.moe_decoder import check_expert_count, main_layers
from mtp_checkpoints.families.parts.feed_forward import GatedMlp, Moe, Router
from mtp_checkpoints.families.parts.gqa import Gqa
from mtp_checkpoints.families.parts.sliding_gqa import SlidingGqa, sliding
from mtp_checkpoints.families.spec import LayerSpec, ModelSpec, MtpModules, MtpSpec
from mtp_checkpoints.families.text_part import TextPart

_CONTRACT = MtpContract(source="transformers, generate(use_mtp=True)")
_ROPES = {"full_attention": 500000.0, "sliding_attention": 10000.0}  # usual bases


def spec(fields: Fields) -> ModelSpec:
    """Describe a config.json."""
    known = fields.with_defaults(use_qk_norm=True, partial_rotary_factor=1.0)
    main, count = main_layers(known), at_most_one_mtp_layer(known, 0)
    check_expert_count(known, "num_experts", main + count)
    moe, dense = _moe(known), GatedMlp.of(known)
    slides = sliding(known, main)
    (mtp_slides,) = sliding(known, 1, [True], key="mtp_layer_types")
    kinds = ["sparse"] * main
    if known.has("mlp_layer_types"):
        kinds = [*known.kinds("mlp_layer_types", ("dense", "sparse"), main)]
    layers = [
        LayerSpec(
            f"model.layers.{index}",
            _attention(known, slides=slides[index]),
            moe if kind == "sparse" else dense,
        )
        for index, kind in enumerate(kinds)
    ]
    layer = LayerSpec("mtp.layers.0", _attention(known, slides=mtp_slides), moe)
    module = MtpSpec(layer, MtpModules.of_qwen(), prefix="mtp")
    described = listed_decoder(
        TextPart.whole(known), layers, [module] * count, _CONTRACT, mtp_prefix="mtp"
    )
    return replace(described, engines=(), linear_projection=True)


def _attention(fields: Fields, *, slides: bool) -> Gqa:
    """Read the attention of layers with a sliding window or without, which rotate differently."""
    kind = "sliding_attention" if slides else "full_attention"
    rope = {"rope_theta": _ROPES[kind], **fields.section("rope_parameters").section(kind).values}
    return (SlidingGqa if slides else Gqa).of(fields.with_values(rope_parameters=rope))


def _moe(fields: Fields) -> Moe:
    experts, inner = fields.whole("num_experts"), fields.whole("moe_intermediate_size")
    normalises = fields.flag("norm_topk_prob", True)
    return Moe(
        replace(GatedMlp.of(fields), inner=inner),
        experts,
        shared=0,
        router=Router.softmax(fields, experts, normalises=normalises),
    )
