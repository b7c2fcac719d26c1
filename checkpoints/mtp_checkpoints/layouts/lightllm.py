"""LightLLM (and SGLang before it read layer 61): the MTP layer becomes decoder layer 0."""

from __future__ import annotations

from mtp_checkpoints.layouts.base import Deployment, Engine, SingleLayer, Target

_LAYOUT = SingleLayer("model.layers.0")


def _launch(bundle: Deployment) -> str:
    return (
        f"python -m lightllm.server.api_server --model_dir {bundle.main} --mtp_mode eagle_with_att"
        f" --mtp_draft_model_dir {bundle.mtp} --mtp_step {bundle.draft_tokens}{_placement(bundle)}"
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
    mtp_name=_LAYOUT.mtp_name,
    mtp_config=_LAYOUT.mtp_config,
    released_config=_LAYOUT.released_config,
    model_types=frozenset({"deepseek_v3"}),
)
