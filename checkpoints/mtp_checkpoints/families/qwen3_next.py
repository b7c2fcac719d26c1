"""Qwen3-Next: gated delta nets, attention of gated heads in every fourth layer, a mixture of
experts that are stored one by one, and an MTP module that config.json does not count.

Source: config.json and the index of the released Qwen3-Next-80B-A3B; transformers' qwen3_next;
vLLM's qwen3_next_mtp.
"""

from __future__ import annotations

from dataclasses import replace

from mtp_checkpoints.errors import UnsupportedError
from mtp_checkpoints.families.engine_draft import SGLANG_FIRST_LAYER
from mtp_checkpoints.families.examples import QWEN3_NEXT, Example, Reader
from mtp_checkpoints.families.fields import Fields
from mtp_checkpoints.families.gated_delta_decoder import gated_delta_decoder
from mtp_checkpoints.families.moe_decoder import check_expert_count, main_layers
from mtp_checkpoints.families.parts.feed_forward import Moe
from mtp_checkpoints.families.releases import QWEN, Releases
from mtp_checkpoints.families.signs import USUAL_COUNTS
from mtp_checkpoints.families.spec import ModelSpec
from mtp_checkpoints.families.text_part import TextPart


def spec(fields: Fields) -> ModelSpec:
    """Describe a config.json."""
    check_expert_count(fields, "num_experts", main_layers(fields) + 1)
    refuse_dense_layers(fields)
    described = gated_delta_decoder(
        TextPart.whole(fields),
        Moe.gated(fields, normalises=fields.flag("norm_topk_prob", True)),
        usual_mtp_layers=USUAL_COUNTS["qwen3_next"],
        is_interleaved=True,
    )
    return replace(described, sglang=SGLANG_FIRST_LAYER)


def refuse_dense_layers(fields: Fields) -> None:
    """Raise UnsupportedError for layers without experts, of which no release has any."""
    for key, usual in (("mlp_only_layers", []), ("decoder_sparse_step", 1)):
        found = fields.values.get(key)
        if found is not None and found != usual:
            raise UnsupportedError(
                f"config.json sets {key}, which gives layers no experts, as no release does",
                expected=usual,
                found=repr(found)[:100],
            )


EXAMPLES = {
    "qwen3_next": Example(
        QWEN3_NEXT,
        mtp_model={"mtp_layer_types": ["full_attention"]},
        vllm=Reader("Qwen3NextMTP"),
    ),
}
RELEASES: Releases = {"qwen3_next": {**QWEN, "norm_topk_prob": (True,)}}
