"""Mellum2: grouped-query attention with norms of queries and keys, in most layers to the last
tokens alone, a mixture of experts behind a softmax router, and an MTP layer of the same kind.

Source: transformers' mellum and its mapping of the MTP module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mtp_checkpoints.families.contract import MtpContract
from mtp_checkpoints.families.examples import EXPERTS, PLAIN, Config, Example
from mtp_checkpoints.families.fields import Fields
from mtp_checkpoints.families.gated_delta_decoder import at_most_one_mtp_layer
from mtp_checkpoints.families.listed_decoder import listed_decoder
from mtp_checkpoints.families.moe_decoder import check_expert_count, main_layers
from mtp_checkpoints.families.parts.feed_forward import GatedMlp, Moe, Router
from mtp_checkpoints.families.parts.gqa import Gqa
from mtp_checkpoints.families.parts.sliding_gqa import SlidingGqa, sliding
from mtp_checkpoints.families.releases import Releases
from mtp_checkpoints.families.spec import LayerSpec, ModelSpec, MtpModules, MtpSpec
from mtp_checkpoints.families.text_part import TextPart

_CONTRACT = MtpContract(source="transformers, generate(use_mtp=True)")
_ROPES = {"full_attention": 500000.0, "sliding_attention": 10000.0}  # usual bases


def spec(fields: Fields) -> ModelSpec:
    """Describe a config.json."""
    known = fields.with_defaults(use_qk_norm=True, partial_rotary_factor=1.0)
    main = main_layers(known)
    slides = sliding(known, main)
    (mtp_slides,) = sliding(known, 1, [True], key="mtp_layer_types")
    sparse = [True] * main
    if known.has("mlp_layer_types"):
        kinds = known.kinds("mlp_layer_types", ("dense", "sparse"), main)
        sparse = [kind == "sparse" for kind in kinds]
    attentions = [_attention(known, slides=one) for one in (*slides, mtp_slides)]
    return replace(softmax_decoder(known, attentions, sparse, _CONTRACT), engines=())


def softmax_decoder(
    fields: Fields, attentions: Sequence[Gqa], sparse: Sequence[bool], contract: MtpContract
) -> ModelSpec:
    """Describe a decoder with an MTP layer of Qwen's names, whose layers have experts behind a
    softmax router where sparse says so, as the MTP layer has; attentions: those of main layers,
    then that of the MTP layer."""
    count = at_most_one_mtp_layer(fields, 0)
    check_expert_count(fields, "num_experts", sum(sparse) + count)
    moe, dense = _moe(fields), GatedMlp.of(fields)
    layers = [
        LayerSpec(f"model.layers.{index}", attentions[index], moe if has_experts else dense)
        for index, has_experts in enumerate(sparse)
    ]
    layer = LayerSpec("mtp.layers.0", attentions[-1], moe)
    module = MtpSpec(layer, MtpModules.of_qwen(), prefix="mtp")
    described = listed_decoder(
        TextPart.whole(fields), layers, [module] * count, contract, mtp_prefix="mtp"
    )
    return replace(described, mtp_names=())


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


_MELLUM: Config = PLAIN | {
    "architectures": ["MellumForCausalLM"],
    "model_type": "mellum",
    "num_experts": 8,
    "norm_topk_prob": True,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 24,
    "num_nextn_predict_layers": 1,
    **EXPERTS,
}
EXAMPLES = {
    "mellum": Example(
        _MELLUM,
        mtp_model={},
    ),
}
# Mellum 2: transformers' mellum. Mellum 2.1: what a server of it asks of its config.json.
RELEASES: Releases = {
    "mellum": {
        "rms_norm_eps": (1e-6,),
        "rope_theta": (500000.0, 10000.0),
        "norm_topk_prob": (True,),
        "sliding_window": (1024,),
    }
}
