"""Released layout, which vLLM and SGLang load as a draft folder as it is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from operator import attrgetter
from shlex import quote
from typing import Any

from mtp_checkpoints.formats import (
    GGUF,
    Int8Channel,
    MxFp4Packed,
    MxFp8,
    QuarkInt4,
    QuarkInt8,
)
from mtp_checkpoints.layouts.base import (
    Config,
    Deployment,
    DraftLaunch,
    DraftReading,
    Engine,
    Target,
)
from mtp_checkpoints.quantization.method import SGLANG, VLLM
from mtp_checkpoints.quantization.methods import METHODS
from mtp_checkpoints.quantization.readers import sglang_reads, vllm_reads
from mtp_checkpoints.quantization.sglang_quark import quark_draft
from mtp_checkpoints.quantization.undecoded import MLX_METHOD

VLLM_PROBE = "command -v vllm"


VLLM_READING = DraftReading(
    by_main_config=True,
    reason="vLLM builds the draft with the quantization of the main model",
    draft=attrgetter("vllm"),
    reads=vllm_reads,
    refuses_recomputed=frozenset({"glm4_moe"}),  # glm4_moe_mtp.py looks up every name of the layer
)
# Of compressed-tensors vLLM builds a head as any linear that a target names. So does SGLang 0.5.23,
# but it gives the draft its `weight` (get_embed_and_head of its models), which packed codes lack.
_VLLM_HEADS = frozenset({Int8Channel.storage})
_METHODS = frozenset(METHODS) - {GGUF}  # which no folder of safetensors has
_SGLANG_PORT = 20000  # at which its machines find each other


def _name(name: str, layer: int) -> str:
    return name


def _config(config: Mapping[str, Any]) -> Config:
    return dict(config)


def _released(config: Mapping[str, Any], main_layers: int) -> Config:
    return dict(config)


def vllm_launch(bundle: Deployment, method: str) -> str:
    """Return the command that serves a bundle with drafts by a method."""
    speculation = {
        "method": method,
        "model": str(bundle.folder(bundle.draft)),
        "num_speculative_tokens": bundle.draft_tokens,
    }
    settings = quote(json.dumps(speculation, ensure_ascii=False))
    return f"vllm serve {bundle.main} --speculative-config {settings}{_vllm_placement(bundle)}"


def _vllm_placement(bundle: Deployment) -> str:
    place = bundle.placement
    if place is None:
        return ""
    words = f" --tensor-parallel-size {place.tp}"
    if place.nodes > 1:
        words += f" --nnodes {place.nodes} --node-rank {place.node} --master-addr {place.head}"
    return words + (" --headless" if place.node else "")


# Of heads vLLM computes Medusa's alone, which their config.json says.
VLLM_DRAFTS = (
    DraftLaunch("eagle3", "deepseek_v2", partial(vllm_launch, method="eagle3")),
    DraftLaunch("parallel_heads", "medusa", partial(vllm_launch, method="medusa")),
)


def _sglang(bundle: Deployment, algorithm: str) -> str:
    # Of GLM's it fuses shared experts with routed ones whatever quantization_config says of them.
    separate = "" if bundle.experts_alike else " --disable-shared-experts-fusion"
    return (
        f"python -m sglang.launch_server --model-path {bundle.main}"
        f" --speculative-algorithm {algorithm}"
        f" --speculative-draft-model-path {quote(str(bundle.folder(bundle.draft)))}"
        f" --speculative-num-steps {bundle.draft_tokens} --speculative-eagle-topk 1"
        f" --speculative-num-draft-tokens {bundle.draft_tokens + 1}{separate}"
        f"{_sglang_placement(bundle)}"
    )


def _sglang_placement(bundle: Deployment) -> str:
    place = bundle.placement
    if place is None:
        return ""
    words = f" --tp {place.tp}"
    if place.nodes > 1:
        head = f"{place.head}:{_SGLANG_PORT}"
        words += f" --nnodes {place.nodes} --node-rank {place.node} --dist-init-addr {head}"
    return words


# Integers under the layout's own name are written as vLLM and most others read them.
HF = Target(
    name="hf",
    engines=(
        Engine("hf", _METHODS, VLLM, _VLLM_HEADS),
        Engine(
            "vllm",
            _METHODS - {"w4afp8", "bitsandbytes", MLX_METHOD},
            VLLM,
            _VLLM_HEADS,
            launch=partial(vllm_launch, method="mtp"),
            extra_drafts=VLLM_DRAFTS,
            probe=VLLM_PROBE,
            title="vLLM",
            draft_reading=VLLM_READING,
        ),
        Engine(
            "sglang",
            _METHODS - {MLX_METHOD},
            SGLANG,
            launch=partial(_sglang, algorithm="EAGLE"),
            extra_drafts=(
                DraftLaunch("eagle3", "deepseek_v2", partial(_sglang, algorithm="EAGLE3")),
            ),
            probe="python -c 'import sglang'",
            title="SGLang",
            draft_reading=DraftReading(
                by_main_config=False,
                reason="SGLang builds the draft by the quantization of its own config.json",
                draft=attrgetter("sglang"),
                reads=sglang_reads,
                by_class={"quark": quark_draft},
                loads_tables=False,
            ),
            unread={
                MxFp4Packed.storage: "its compressed-tensors loader has no linear layers in mxfp4,"
                " and skips experts of this name",
                MxFp8.storage: "its compressed-tensors loader has no mxfp8",
                **dict.fromkeys(
                    (QuarkInt4.storage, QuarkInt8.storage), "of Quark it loads fp8 and mxfp4 alone"
                ),
            },
        ),
        Engine("tensorrt-llm", title="TensorRT-LLM"),
    ),
    mtp_name=_name,
    mtp_config=_config,
    released_config=_released,
    model_types=None,
    mtp_methods=_METHODS,
    single_mtp_layer=False,
)
