"""Nemotron-3 Nano Omni: Nemotron-3 as the decoder of a model with towers for images and sound,
which stay as they are.

Source: transformers' nemotron_h_omni; SGLang's nano_nemotron_vl and nemotron_h_mtp.
"""

from __future__ import annotations

from mtp_checkpoints.families.examples import NEMOTRON_H, Config, Example, Reader
from mtp_checkpoints.families.fields import Fields
from mtp_checkpoints.families.nemotron_h import decoder, main_parts, mtp_parts
from mtp_checkpoints.families.releases import Releases
from mtp_checkpoints.families.spec import ModelSpec
from mtp_checkpoints.families.text_part import TextPart

_DECODER = "language_model"
_BESIDE = (
    *("vision_model.", "vision_projector.", "vision_final_layernorm.", "vision_tower.", "mlp1."),
    *("sound_encoder.", "sound_projection.", "audio_tower.", "audio_projector."),
)


def spec(fields: Fields) -> ModelSpec:
    """Describe a config.json with a text_config, which releases call llm_config."""
    named = fields.named(text_config="llm_config") if fields.has("llm_config") else fields
    part = TextPart.of(named, _DECODER, _BESIDE)
    return decoder(part, main_parts(part.fields), mtp_parts(part.fields), f"{_DECODER}.")


_NEMOTRON_H_OMNI: Config = {
    "architectures": ["NemotronH_Omni_Reasoning_V3"],
    "model_type": "nemotron_h_omni",
    "tie_word_embeddings": False,
    "text_config": {key: one for key, one in NEMOTRON_H.items() if key != "architectures"},
    "vision_config": {"model_type": "radio", "hidden_size": 32, "intermediate_size": 32}
    | {"num_hidden_layers": 1, "num_attention_heads": 2, "video_temporal_patch_size": 2},
    "projector_hidden_size": 32,
    "vision_hidden_size": 32,
}
EXAMPLES = {
    "nemotron_h_omni": Example(
        _NEMOTRON_H_OMNI,
        vllm=Reader("NemotronHMTP", needs_gpu=True),
    ),
}
RELEASES: Releases = {"nemotron_h_omni": None}  # no release read
