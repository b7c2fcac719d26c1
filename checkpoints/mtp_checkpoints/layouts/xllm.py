"""xLLM on NPU: a model type of its own, MTP tensors at model level, everything in bf16."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mtp_checkpoints.layouts.base import (
    Config,
    Deployment,
    Engine,
    Placement,
    SingleLayer,
    Target,
)
from mtp_checkpoints.quantization.native import replaced_quantization

_LAYOUT = SingleLayer(
    "model.layers.0",
    names={
        module: f"model.{module}"
        for module in ("embed_tokens", "shared_head", "enorm", "hnorm", "eh_proj")
    },
    changes={"model_type": "deepseek_v3_mtp", "architectures": ["DeepseekMTPForCausalLM"]},
)


def _config(config: Mapping[str, Any]) -> Config:
    # xLLM wants the field, and it empty.
    return _LAYOUT.mtp_config(replaced_quantization(config, ""))


def _released(config: Mapping[str, Any], main_layers: int) -> Config:
    return _LAYOUT.released_config(config, main_layers) | {"model_type": "deepseek_v3"}


def _launch(bundle: Deployment) -> str:
    """Start one process per NPU: without a placement 16 on one machine, as xLLM's MTP guide does
    with DeepSeek-V3. nnodes counts processes.
    """
    place = bundle.placement or Placement(tp=16)
    first, last = place.ranks[0], place.ranks[-1]
    device = "$i" if first == 0 else f"$((i - {first}))"
    return (
        f'for i in $(seq {first} {last}); do xllm --model {bundle.main} --devices="npu:{device}"'
        f" --port $((13222 + i)) --master_node_addr={place.head}:42123 --nnodes={place.tp}"
        f' --draft_model {bundle.mtp} --draft_devices="npu:{device}"'
        f" --num_speculative_tokens {bundle.draft_tokens}"
        " --max_memory_utilization=0.90 --max_tokens_per_batch=10000 --max_seqs_per_batch=256"
        " --enable_mla=true --block_size=128 --ep_size=1 --dp_size=1 --enable_prefix_cache=false"
        ' --enable_chunked_prefill=false --node_rank=$i > "xllm_$i.log" 2>&1 & done'
    )


XLLM = Target(
    name="xllm",
    engines=(Engine("xllm", launch=_launch, probe="command -v xllm"),),
    mtp_name=_LAYOUT.mtp_name,
    mtp_config=_config,
    released_config=_released,
    model_types=frozenset({"deepseek_v3"}),
    dequantizes=True,
    mtp_methods=frozenset(),
)
