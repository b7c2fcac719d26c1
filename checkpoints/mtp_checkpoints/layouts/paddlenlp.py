"""PaddleNLP: prefix deepseek_v3_mtp, linear weights and their scales stored as [in, out]."""

from __future__ import annotations

from shlex import quote

from mtp_checkpoints.layouts.base import Deployment, Engine, Placement, SingleLayer, Target

_LAYOUT = SingleLayer(
    "deepseek_v3_mtp.layers.0",
    names={
        "embed_tokens": "deepseek_v3_mtp.embed_tokens",
        "enorm": "deepseek_v3_mtp.enorm",
        "hnorm": "deepseek_v3_mtp.hnorm",
        "eh_proj": "deepseek_v3_mtp.eh_proj",
        "shared_head.norm": "deepseek_v3_mtp.norm",
        "shared_head.head": "lm_head",
    },
)
_IMAGE = (
    "ccr-2vdh3abv-pub.cnc.bj.baidubce.com/paddlepaddle/paddlenlp:llm-serving-cuda124-cudnn9-v2.1"
)
_QUANTIZED_AT_LOAD = {"bf16": "weight_only_int8"}  # by PaddleNLP


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
        f" && export SPECULATE_MAX_DRAFT_TOKEN_NUM={bundle.draft_tokens}"
        " && start_server $model_name && tail -f /dev/null'"
    )


PADDLENLP = Target(
    name="paddlenlp",
    engines=(Engine("paddlenlp", launch=_launch, probe="command -v docker"),),
    mtp_name=_LAYOUT.mtp_name,
    mtp_config=_LAYOUT.mtp_config,
    released_config=_LAYOUT.released_config,
    model_types=frozenset({"deepseek_v3"}),
    needs_shared_weights=True,
    transposes=True,
)
