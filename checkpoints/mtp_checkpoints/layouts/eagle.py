"""vLLM's EAGLE draft for DeepSeek: the MTP layer under the names of EagleDeepSeekMTPModel, which
feeds it as it was trained. vLLM's own MTP model zeroes the embedding of position 0."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from mtp_checkpoints.layouts.base import Engine, SingleLayer, Target
from mtp_checkpoints.layouts.hf import VLLM_DRAFTS, VLLM_PROBE, VLLM_READING, vllm_launch

# Of model_type deepseek_v3 vLLM makes DeepSeekMTPModel, and of that, for EAGLE, its own class.
_LAYOUT = SingleLayer(
    "layers.0",
    names={
        "embed_tokens": "embed_tokens",
        "enorm": "enorm",
        "hnorm": "hnorm",
        "eh_proj": "fc",
        "shared_head.norm": "norm",
        "shared_head.head": "lm_head",
    },
)

EAGLE = Target(
    name="eagle",
    engines=(
        Engine(
            "eagle",
            launch=partial(vllm_launch, method="eagle"),
            extra_drafts=VLLM_DRAFTS,
            probe=VLLM_PROBE,
            title="vLLM",
            draft_reading=replace(VLLM_READING, method="EAGLE"),
        ),
    ),
    mtp_name=_LAYOUT.mtp_name,
    mtp_config=_LAYOUT.mtp_config,
    released_config=_LAYOUT.released_config,
    model_types=frozenset({"deepseek_v3"}),
)
