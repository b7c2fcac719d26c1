"""The released layout, which vLLM and SGLang load as a separate draft folder unmodified."""

from __future__ import annotations

import json
from collections.abc import Mapping
from shlex import quote
from typing import Any

from mtp_export.targets.base import Config, Deployment, Target


def _name(name: str, layer: int) -> str:
    return name


def _config(config: Mapping[str, Any]) -> Config:
    return {**config, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}


def _released(config: Mapping[str, Any], main_layers: int) -> Config:
    return dict(config)


def _vllm(bundle: Deployment) -> str:
    speculation = {"method": "mtp", "model": str(bundle.folder("mtp")), "num_speculative_tokens": 1}
    settings = quote(json.dumps(speculation, ensure_ascii=False))
    return f"vllm serve {bundle.main} --speculative-config {settings}"


def _sglang(bundle: Deployment) -> str:
    return (
        f"python -m sglang.launch_server --model-path {bundle.main} --speculative-algorithm EAGLE"
        f" --speculative-draft-model-path {bundle.mtp} --speculative-num-steps 1"
        " --speculative-eagle-topk 1 --speculative-num-draft-tokens 2"
    )


HF = Target(
    name="hf",
    engines=("vllm", "sglang", "tensorrt-llm"),
    mtp_name=_name,
    mtp_config=_config,
    released_config=_released,
    single_mtp_layer=False,
    integer_options=("hf", "vllm", "sglang"),
    mtp_schemes=None,
    launch={"vllm": _vllm, "sglang": _sglang},
)
