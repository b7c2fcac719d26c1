"""vLLM's EAGLE draft for DeepSeek: the MTP layer under the names of EagleDeepSeekMTPModel, which
feeds it as it was trained. vLLM's own MTP model zeroes the embedding of position 0."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from mtp_checkpoints.layouts.base import (
    Config,
    DraftReading,
    Engine,
    Target,
    released_from_single_layer,
    single_layer_config,
)
from mtp_checkpoints.layouts.vllm import VLLM_PROBE, vllm_launch

_RENAMED = {
    "eh_proj.weight": "fc.weight",
    "shared_head.norm.weight": "norm.weight",
    "shared_head.head.weight": "lm_head.weight",
}
_MODEL_LEVEL = ("embed_tokens", "enorm", "hnorm")


def _name(name: str, layer: int) -> str:
    rest = name.removeprefix(f"model.layers.{layer}.")
    if rest in _RENAMED:
        return _RENAMED[rest]
    return rest if rest.split(".")[0] in _MODEL_LEVEL else f"layers.0.{rest}"


def _config(config: Mapping[str, Any]) -> Config:
    # Of model_type deepseek_v3 vLLM makes DeepSeekMTPModel, and of that, for EAGLE, its own class.
    return single_layer_config(config, _name)


EAGLE = Target(
    name="eagle",
    engines=(
        Engine(
            "eagle",
            launch=partial(vllm_launch, method="eagle"),
            probe=VLLM_PROBE,
            title="vLLM (EAGLE)",
            draft_reading=DraftReading(
                by_main_config=True,
                reason="vLLM builds the draft with the quantization_config of main/config.json",
            ),
        ),
    ),
    mtp_name=_name,
    mtp_config=_config,
    released_config=released_from_single_layer,
    model_types=frozenset({"deepseek_v3"}),
)
