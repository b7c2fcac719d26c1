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
from mtp_checkpoints.families.spec import LayerSpec, ModelSpec, MtpModules, MtpSpec
from mtp_checkpoints.families.text_part import TextPart

_CONTRACT = MtpContract(source="transformers, generate(use_mtp=True)")


def spec(fields: Fields) -> ModelSpec:
    """Describe a config.json."""
    known = fields.with_defaults(use_qk_norm=True, partial_rotary_factor=1.0)
    main, count = main_layers(known), at_most_one_mtp_layer(known, 0)
    check_expert_count(known, "num_experts", main + count)
    attention, moe, dense = Gqa.of(known), _moe(known), GatedMlp.of(known)
    kinds = ["sparse"] * main
    if known.has("mlp_layer_types"):
        kinds = [*known.kinds("mlp_layer_types", ("dense", "sparse"), main)]
    layers = [
        LayerSpec(f"model.layers.{index}", attention, moe if kind == "sparse" else dense)
        for index, kind in enumerate(kinds)
    ]
    module = MtpSpec(LayerSpec("mtp.layers.0", attention, moe), MtpModules.of_qwen(), prefix="mtp")
    described = listed_decoder(
        TextPart.whole(known), layers, [module] * count, _CONTRACT, mtp_prefix="mtp"
    )
    return replace(
        described,
        engines=(),
        linear_projection=True,
        uncomputed="some layers attend to the last tokens alone",
    )


def _moe(fields: Fields) -> Moe:
    experts, inner = fields.whole("num_experts"), fields.whole("moe_intermediate_size")
    normalises = fields.flag("norm_topk_prob", True)
    return Moe(
        replace(GatedMlp.of(fields), inner=inner),
        experts,
        shared=0,
        router=Router.softmax(fields, experts, normalises=normalises),
    )
