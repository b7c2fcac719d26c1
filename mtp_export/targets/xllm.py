"""xLLM on NPU: a model type of its own, the MTP parts at model level, everything in bf16."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mtp_export.targets.base import (
    Config,
    Target,
    released_from_single_layer,
    single_layer_config,
)

_MODEL_LEVEL = ("embed_tokens", "shared_head", "enorm", "hnorm", "eh_proj")


def _name(name: str, layer: int) -> str:
    rest = name.removeprefix(f"model.layers.{layer}.")
    if rest.split(".")[0] in _MODEL_LEVEL:
        return f"model.{rest}"
    return f"model.layers.0.{rest}"


def _config(config: Mapping[str, Any]) -> Config:
    return single_layer_config(
        config,
        _name,
        model_type="deepseek_v3_mtp",
        architectures=["DeepseekMTPForCausalLM"],
        quantization_config="",
    )


def _released(config: Mapping[str, Any], main_layers: int) -> Config:
    return released_from_single_layer(config, main_layers) | {"model_type": "deepseek_v3"}


XLLM = Target(
    name="xllm",
    engines=(),
    mtp_name=_name,
    mtp_config=_config,
    released_config=_released,
    dequantizes=True,
    mtp_schemes=frozenset({"bf16"}),
)
