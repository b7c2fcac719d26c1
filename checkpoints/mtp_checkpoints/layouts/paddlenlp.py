"""PaddleNLP: prefix deepseek_v3_mtp, linear weights and their scales stored as [in, out]."""

from __future__ import annotations

from collections.abc import Mapping
from shlex import quote
from typing import Any

from mtp_checkpoints.layouts.base import (
    Config,
    Deployment,
    Engine,
    Placement,
    Target,
    released_from_single_layer,
    single_layer_config,
)

_PREFIX = "deepseek_v3_mtp."
_RENAMED = {
    "embed_tokens.weight": f"{_PREFIX}embed_tokens.weight",
    "shared_head.norm.weight": f"{_PREFIX}norm.weight",
    "shared_head.head.weight": "lm_head.weight",
}
_IMAGE = (
    "ccr-2vdh3abv-pub.cnc.bj.baidubce.com/paddlepaddle/paddlenlp:llm-serving-cuda124-cudnn9-v2.1"
)
_QUANTIZED_AT_LOAD = {"bf16": "weight_only_int8"}  # by PaddleNLP
_MODEL_LEVEL = ("enorm", "hnorm", "eh_proj")


def _name(name: str, layer: int) -> str:
    rest = name.removeprefix(f"model.layers.{layer}.")
    if rest in _RENAMED:
        return _RENAMED[rest]
    if rest.split(".")[0] in _MODEL_LEVEL:
        return f"{_PREFIX}{rest}"
    return f"{_PREFIX}layers.0.{rest}"


def _config(config: Mapping[str, Any]) -> Config:
    return single_layer_config(config, _name)


def _launch(bundle: Deployment) -> str:
    """Serve on each of two machines of 8 GPUs, or as placed, whose addresses POD_0_IP and POD_IPS
    hold.

    The variables are those of PaddleNLP's guide to speculative decoding.
    """
    place = bundle.placement or Placement(tp=16, nodes=2)
    gpus = ",".join(map(str, range(place.devices)))
    main, mtp = (quote(str(bundle.folder(part).resolve())) for part in ("main", "mtp"))
    base_type, mtp_type = (
        _QUANTIZED_AT_LOAD.get(scheme, scheme) for scheme in (bundle.base_scheme, bundle.mtp_scheme)
    )
    return (
        "docker run --gpus all --shm-size 32G --network=host --privileged --cap-add=SYS_PTRACE"
        f" -v {main}:/models -v {mtp}:/models-mtp -e POD_0_IP -e POD_IPS"
        f" -e model_name=deepseek-ai/DeepSeek-R1-MTP-2nodes/{base_type} -dit {_IMAGE}"
        f" /bin/bash -c -ex 'export CUDA_VISIBLE_DEVICES={gpus} && export MP_NUM={place.tp}"
        f" && export MP_NNODE={place.nodes} && export SPECULATE_MODEL_QUANT_TYPE={mtp_type}"
        " && export SPECULATE_METHOD=mtp && export SPECULATE_MODEL_PATH=/models-mtp"
        " && export SPECULATE_MAX_DRAFT_TOKEN_NUM=1 && start_server $model_name"
        " && tail -f /dev/null'"
    )


PADDLENLP = Target(
    name="paddlenlp",
    engines=(Engine("paddlenlp", launch=_launch, probe="command -v docker"),),
    mtp_name=_name,
    mtp_config=_config,
    released_config=released_from_single_layer,
    model_types=frozenset({"deepseek_v3"}),
    needs_shared_weights=True,
    transposes=True,
)
