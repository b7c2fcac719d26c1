"""The released layout, which vLLM and SGLang load as a separate draft folder unmodified."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mtp_export.targets.base import Config, Target


def _name(name: str, layer: int) -> str:
    return name


def _config(config: Mapping[str, Any]) -> Config:
    return {**config, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}


def _released(config: Mapping[str, Any], main_layers: int) -> Config:
    return dict(config)


HF = Target(
    name="hf",
    engines=("vllm", "sglang", "tensorrt-llm"),
    mtp_name=_name,
    mtp_config=_config,
    released_config=_released,
    single_mtp_layer=False,
    mtp_schemes=None,
)
