"""vLLM's command, for each of its ways to read a draft."""

from __future__ import annotations

import json
from shlex import quote

from mtp_checkpoints.layouts.base import Deployment

VLLM_PROBE = "command -v vllm"


def vllm_launch(bundle: Deployment, method: str) -> str:
    """Return the command that serves a bundle with one draft token by a method."""
    speculation = {
        "method": method,
        "model": str(bundle.folder("mtp")),
        "num_speculative_tokens": 1,
    }
    settings = quote(json.dumps(speculation, ensure_ascii=False))
    return f"vllm serve {bundle.main} --speculative-config {settings}{_placement(bundle)}"


def _placement(bundle: Deployment) -> str:
    place = bundle.placement
    if place is None:
        return ""
    words = f" --tensor-parallel-size {place.tp}"
    if place.nodes > 1:
        words += f" --nnodes {place.nodes} --node-rank {place.node} --master-addr {place.head}"
    return words + (" --headless" if place.node else "")
