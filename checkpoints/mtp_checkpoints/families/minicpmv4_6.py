"""MiniCPM-V-4.6: the layers and the MTP module of Qwen3.5, dense, beside a vision tower that is
carried as it is.

Source: transformers' minicpmv4_6; vLLM's, which leaves the module's tensors out.
"""

from __future__ import annotations

from dataclasses import replace

from mtp_checkpoints.families import qwen3_5
from mtp_checkpoints.families.examples import Example
from mtp_checkpoints.families.fields import Fields
from mtp_checkpoints.families.releases import QWEN, Releases
from mtp_checkpoints.families.spec import ModelSpec
from mtp_checkpoints.families.text_part import TextPart

_TOWER = ("model.vision_tower.", "model.merger.")


def spec(fields: Fields) -> ModelSpec:
    """Describe a config.json with a text_config."""
    return replace(qwen3_5.decoder(TextPart.of(fields, carried=_TOWER)), engines=())


EXAMPLES = {
    "minicpmv4_6": Example(
        {
            "architectures": ["MiniCPMV4_6ForConditionalGeneration"],
            "model_type": "minicpmv4_6",
            "tie_word_embeddings": True,
            "text_config": qwen3_5.EXAMPLES["qwen3_5"].config["text_config"],
            "vision_config": {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
            | {"num_attention_heads": 2, "image_size": 28, "patch_size": 14},
            "insert_layer_id": 0,
        },
    ),
}
# MiniCPM-V-4.6, a Qwen3.5: the text part of its config.json in a test of an engine.
RELEASES: Releases = {"minicpmv4_6": QWEN}
