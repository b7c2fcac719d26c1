"""LightLLM (and SGLang before it read layer 61): the MTP layer becomes decoder layer 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mtp_checkpoints.layouts.base import (
    Config,
    Deployment,
    Engine,
    Target,
    released_from_single_layer,
    single_layer_config,
)


def _name(name: str, layer: int) -> str:
    return name.replace(f"model.layers.{layer}.", "model.layers.0.", 1)


def _config(config: Mapping[str, Any]) -> Config:
    return single_layer_config(config, _name)


def _launch(bundle: Deployment) -> str:
    return (
        f"python -m lightllm.server.api_server --model_dir {bundle.main} --mtp_mode eagle_with_att"
        f" --mtp_draft_model_dir {bundle.mtp} --mtp_step 1{_placement(bundle)}"
    )


def _placement(bundle: Deployment) -> str:
    place = bundle.placement
    if place is None:
        return ""
    words = f" --tp {place.tp}"
    if place.nodes > 1:
        words += f" --nccl_host {place.head} --nnodes {place.nodes} --node_rank {place.node}"
    return words


LIGHTLLM = Target(
    name="lightllm",
    engines=(Engine("lightllm", launch=_launch, probe="python -c 'import lightllm'"),),
    mtp_name=_name,
    mtp_config=_config,
    released_config=released_from_single_layer,
    model_types=frozenset({"deepseek_v3"}),
)
