"""Qwen3.5 and 3.6 with a mixture of experts: as the dense models, with the experts of main layers
stored fused. Those of the MTP layer are stored one by one in 3.5, and fused in 3.6.

Source: config.json and the index of the released checkpoints, 35B-A3B and larger; transformers'
qwen3_5_moe; vLLM's qwen3_5_mtp.
"""

from __future__ import annotations

from dataclasses import replace

from mtp_checkpoints.families.examples import QWEN3_5_MOE, QWEN3_5_MOE_TEXT, Example, Reader
from mtp_checkpoints.families.fields import Fields
from mtp_checkpoints.families.gated_delta_decoder import gated_delta_decoder
from mtp_checkpoints.families.moe_decoder import check_expert_count, main_layers
from mtp_checkpoints.families.parts.feed_forward import Moe
from mtp_checkpoints.families.releases import QWEN, Releases
from mtp_checkpoints.families.spec import ModelSpec
from mtp_checkpoints.families.text_part import TextPart


def spec(fields: Fields) -> ModelSpec:
    """Describe a config.json with a text_config."""
    return decoder(TextPart.of(fields), is_fused=True)


def text_spec(fields: Fields) -> ModelSpec:
    """Describe a config.json of the text model alone, as transformers saves it: with the experts of
    every layer one by one."""
    return decoder(TextPart.whole(fields), is_fused=False)


def decoder(part: TextPart, *, is_fused: bool) -> ModelSpec:
    """Describe the decoder of a config.json, whatever is beside it; is_fused: the experts of main
    layers are usually stored fused."""
    check_expert_count(part.fields, "num_experts", main_layers(part.fields) + 1)
    apart = Moe.gated(part.fields, normalises=True)  # whatever norm_topk_prob says
    return gated_delta_decoder(
        part,
        replace(apart, is_fused=is_fused),
        usual_mtp_layers=0,
        is_interleaved=False,
        mtp_feed_forward=apart,
    )


EXAMPLES = {
    "qwen3_5_moe": Example(
        QWEN3_5_MOE,
        vllm=Reader("Qwen3_5MoeMTP"),
    ),
    "qwen3_5_moe_text": Example(
        QWEN3_5_MOE_TEXT,
        mtp_model={"mtp_layer_types": ["full_attention"]},
    ),
}
RELEASES: Releases = {"qwen3_5_moe": QWEN, "qwen3_5_moe_text": QWEN}
