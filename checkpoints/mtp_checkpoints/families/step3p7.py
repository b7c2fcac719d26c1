"""Step-3.7: Step-3.5's decoder, described by a text_config, beside a vision tower that is carried
as it is.

Source: transformers' step3p7 and its conversion mapping.
"""

from __future__ import annotations

from mtp_checkpoints.families import step3p5
from mtp_checkpoints.families.fields import Fields
from mtp_checkpoints.families.spec import ModelSpec
from mtp_checkpoints.families.text_part import TextPart

_VISION = ("vision_model.", "vit_large_projector.")


def spec(fields: Fields) -> ModelSpec:
    """Describe a config.json."""
    return step3p5.decoder(TextPart.of(fields, "model", carried=_VISION))
