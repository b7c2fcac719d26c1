"""xLLM on NPU: a model type of its own, the MTP parts at model level, everything in bf16."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mtp_export.targets.base import (
    Config,
    Deployment,
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


def _launch(bundle: Deployment) -> str:
    """One process an NPU, 16 of them, as xLLM's MTP guide starts DeepSeek-V3."""
    return (
        f'for i in $(seq 0 15); do xllm --model {bundle.main} --devices="npu:$i"'
        " --port $((13222 + i)) --master_node_addr=127.0.0.1:42123 --nnodes=16"
        f' --draft_model {bundle.mtp} --draft_devices="npu:$i" --num_speculative_tokens 1'
        " --max_memory_utilization=0.90 --max_tokens_per_batch=10000 --max_seqs_per_batch=256"
        " --enable_mla=true --block_size=128 --ep_size=1 --dp_size=1 --enable_prefix_cache=false"
        ' --enable_chunked_prefill=false --node_rank=$i > "xllm_$i.log" 2>&1 & done'
    )


XLLM = Target(
    name="xllm",
    engines=(),
    mtp_name=_name,
    mtp_config=_config,
    released_config=_released,
    dequantizes=True,
    mtp_schemes=frozenset({"bf16"}),
    launch={"xllm": _launch},
)
