"""Ling-3.0-VL: Ling-3.0 and its MTP layer, beside a vision tower that is carried as it is.

Source: vLLM's bailing_moe_v3_vl and its map of drafts.
"""

from __future__ import annotations

from dataclasses import replace

from mtp_checkpoints.families import bailing_hybrid
from mtp_checkpoints.families.examples import VISION, Example
from mtp_checkpoints.families.fields import Fields
from mtp_checkpoints.families.releases import Releases
from mtp_checkpoints.families.spec import ModelSpec
from mtp_checkpoints.families.text_part import TextPart

_TOWER = ("model.visual.", "model.linear_proj.", "visual.", "linear_proj.")


def spec(fields: Fields) -> ModelSpec:
    """Describe a config.json with a text_config."""
    text = TextPart.of(fields).fields
    return replace(bailing_hybrid.spec(text), carried=_TOWER, engines=("vllm",))


_TEXT = bailing_hybrid.EXAMPLES["bailing_hybrid"]
EXAMPLES = {
    "bailing_moe_v3_vl": Example(
        {
            "architectures": ["BailingMoeV3VLForConditionalGeneration"],
            "model_type": "bailing_moe_v3_vl",
            "text_config": _TEXT.config,
            "vision_config": VISION,
            "mrope_section": [2, 1, 1],
        },
        like=_TEXT.config,
        vllm=_TEXT.vllm,
    ),
}
# Ling-3.0-flash-VL: the text part of its config.json in a test of vLLM.
RELEASES: Releases = {
    "bailing_moe_v3_vl": {
        "rms_norm_eps": (1e-6,),
        "rope_theta": (6e6,),
        "partial_rotary_factor": (0.5,),
    }
}
