"""EXAONE-4.5: dense layers whose norms follow their parts, beside a vision tower that is carried as
it is, and an MTP module of such a layer.

Source: transformers' exaone4_5; vLLM's exaone4_5_mtp.
"""

from __future__ import annotations

from dataclasses import replace

from mtp_checkpoints.families.contract import MtpContract
from mtp_checkpoints.families.fields import Fields
from mtp_checkpoints.families.gated_delta_decoder import at_most_one_mtp_layer
from mtp_checkpoints.families.listed_decoder import listed_decoder
from mtp_checkpoints.families.moe_decoder import main_layers
from mtp_checkpoints.families.parts.feed_forward import GatedMlp
from mtp_checkpoints.families.parts.gqa import Gqa
from mtp_checkpoints.families.spec import LayerSpec, ModelSpec, MtpModules, MtpSpec
from mtp_checkpoints.families.text_part import TextPart

_CONTRACT = MtpContract(source="vLLM")
_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")


def spec(fields: Fields) -> ModelSpec:
    """Describe a config.json."""
    part = TextPart.of(fields)
    known = part.fields.with_defaults(use_qk_norm=True, partial_rotary_factor=1.0)
    attention, mlp = Gqa.of(known), GatedMlp.of(known)

    def layer(prefix: str) -> LayerSpec:
        return LayerSpec(prefix, attention, mlp, norms=_NORMS)

    module = MtpSpec(layer("mtp.layers.0"), MtpModules.of_qwen(), prefix="mtp")
    described = listed_decoder(
        part,
        [layer(f"{part.prefix}.layers.{index}") for index in range(main_layers(known))],
        [module] * at_most_one_mtp_layer(known, 0),
        _CONTRACT,
        mtp_prefix="mtp",
    )
    return replace(
        described,
        engines=("vllm",),
        linear_projection=True,
        uncomputed="norms follow attention and MLP; some layers attend to the last tokens alone",
    )
