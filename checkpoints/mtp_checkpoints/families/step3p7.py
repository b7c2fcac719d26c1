"""Step-3.7: Step-3.5's decoder, described by a text_config, beside a vision tower that is carried
as it is.

Source: transformers' step3p7 and its conversion mapping.
"""

from __future__ import annotations

from mtp_checkpoints.families import step3p5
from mtp_checkpoints.families.examples import STEP3P5, Config, Example, Reader
from mtp_checkpoints.families.fields import Fields
from mtp_checkpoints.families.releases import Releases
from mtp_checkpoints.families.spec import ModelSpec
from mtp_checkpoints.families.step3p5 import SGLANG_FIELDS
from mtp_checkpoints.families.text_part import TextPart

_VISION = ("vision_model.", "vit_large_projector.")


def spec(fields: Fields) -> ModelSpec:
    """Describe a config.json."""
    return step3p5.decoder(TextPart.of(fields, "model", carried=_VISION))


_STEP3P7: Config = {
    "architectures": ["Step3p7ForConditionalGeneration"],
    "model_type": "step3p7",
    "text_config": {key: value for key, value in STEP3P5.items() if key != "architectures"},
    "vision_config": {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    },
}
EXAMPLES = {
    "step3p7": Example(
        _STEP3P7,
        sglang=Reader("Step3p5MTP", SGLANG_FIELDS, module="step3p5_mtp", layers=3),
    ),
}
# Step-3.7-Flash: the text part of its config.json in tests of two engines.
RELEASES: Releases = {
    "step3p7": {
        "rms_norm_eps": (1e-5,),
        "rope_theta": (5e6, 10000.0),
        "moe_router_scaling_factor": (3.0,),
        "sliding_window": (512,),
    }
}
