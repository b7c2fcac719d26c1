"""Intern-S2-preview: the layers and the MTP module of Qwen3.5, dense or with a mixture of experts,
beside towers for images and time series that are carried as they are.

Source: vLLM's interns2_preview and its map of drafts; SGLang's interns2preview.
"""

from __future__ import annotations

from mtp_checkpoints.families import qwen3_5, qwen3_5_moe
from mtp_checkpoints.families.examples import QWEN3_5_MOE, Config, Example, Reader
from mtp_checkpoints.families.fields import Fields
from mtp_checkpoints.families.releases import Releases
from mtp_checkpoints.families.spec import ModelSpec
from mtp_checkpoints.families.text_part import TextPart

TOWERS = ("model.visual.", "model.time_series.")


def spec(fields: Fields) -> ModelSpec:
    """Describe a config.json with a text_config, which has experts or none."""
    part = TextPart.of(fields, carried=TOWERS)
    if part.fields.has("num_experts"):
        return qwen3_5_moe.decoder(part, is_fused=True)
    return qwen3_5.decoder(part)


_INTERN_S2_PREVIEW: Config = QWEN3_5_MOE | {
    "architectures": ["InternS2PreviewForConditionalGeneration"],
    "model_type": "intern_s2_preview",
}
# Those of an MTP layer of Qwen3.5 with a mixture of experts.
SGLANG_FIELDS = {"full_attention_interval": 1, "layers_block_type": ["attention"]}
SGLANG_FIELDS |= {"norm_topk_prob": True}
EXAMPLES = {
    "intern_s2_preview": Example(
        _INTERN_S2_PREVIEW,
        vllm=Reader("Qwen3_5MoeMTP", needs_gpu=True),
        sglang=Reader("Qwen3_5ForCausalLMMTP", SGLANG_FIELDS, module="qwen3_5_mtp"),
    ),
}
RELEASES: Releases = {"intern_s2_preview": None}  # no release read
