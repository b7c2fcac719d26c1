"""Qwen3.5, 3.6 and 3.8, dense: gated delta nets in their flat layout, attention of gated heads in
every fourth layer, and an MTP module of one layer, beside a vision tower that is carried as it is.

Source: config.json and the index of the released checkpoints, from 0.8B to 27B; transformers'
qwen3_5; vLLM's qwen3_5_mtp.
"""

from __future__ import annotations

from mtp_checkpoints.families.examples import QWEN3_5_MOE_TEXT, Config, Example, Reader, with_vision
from mtp_checkpoints.families.fields import Fields
from mtp_checkpoints.families.gated_delta_decoder import gated_delta_decoder
from mtp_checkpoints.families.parts.feed_forward import GatedMlp
from mtp_checkpoints.families.releases import QWEN, Releases
from mtp_checkpoints.families.spec import ModelSpec
from mtp_checkpoints.families.text_part import TextPart


def spec(fields: Fields) -> ModelSpec:
    """Describe a config.json with a text_config."""
    return decoder(TextPart.of(fields))


def text_spec(fields: Fields) -> ModelSpec:
    """Describe a config.json of the text model alone, as transformers saves it."""
    return decoder(TextPart.whole(fields))


def decoder(part: TextPart) -> ModelSpec:
    """Describe the decoder of a config.json, whatever is beside it."""
    return gated_delta_decoder(
        part, GatedMlp.of(part.fields), usual_mtp_layers=0, is_interleaved=False
    )


_OF_EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
_QWEN3_5_TEXT: Config = {
    **{key: value for key, value in QWEN3_5_MOE_TEXT.items() if key not in _OF_EXPERTS},
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "tie_word_embeddings": True,
}
_QWEN3_5 = with_vision("qwen3_5", "Qwen3_5ForConditionalGeneration", _QWEN3_5_TEXT)


EXAMPLES = {
    "qwen3_5": Example(
        _QWEN3_5,
        vllm=Reader("Qwen3_5MTP"),
    ),
    "qwen3_5_text": Example(
        _QWEN3_5_TEXT,
        mtp_model={"mtp_layer_types": ["full_attention"]},
        sglang=Reader(
            "Qwen3_5ForCausalLMMTP",
            {"full_attention_interval": 1, "layers_block_type": ["attention"]},
            module="qwen3_5_mtp",
        ),
    ),
}
RELEASES: Releases = {"qwen3_5": QWEN, "qwen3_5_text": QWEN}
