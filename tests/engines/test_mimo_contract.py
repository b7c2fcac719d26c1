"""Our drafts of MiMo-7B are those that vLLM's own module makes of the same main model: how the
module is fed, hidden states before the norm and first, position 0 without an embedding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import process
from safetensors.torch import save_file

from cases import export
from mtp_export.verify.evidence.decode import decode
from mtp_runtime.sampling import SamplingParams
from runtime.checkpoints import SMALL_CONFIGS, write_checkpoint
from runtime.harness import load, prompts_of
from runtime.oracles import oracle


def test_drafts_are_those_of_vllms_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three a step; hidden states are transformers', of Qwen2's class."""
    # vLLM derives the width of a head from the others.
    path = write_checkpoint(tmp_path / "model", SMALL_CONFIGS["mimo"] | {"head_dim": 8})
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    decoded = decode(load(path), prompts_of([2, 5, 9], 96), params, method="mtp", k=3)
    requests = [request.tokens for request in decoded.requests]
    contexts = [requests[one.request][: one.last + 1] for one in decoded.proposals]
    ours = [list(one.tokens) for one in decoded.proposals]
    assert sum(map(len, ours)) > 40
    reference = oracle(path, monkeypatch)
    states = tmp_path / "states.safetensors"
    save_file({str(n): before_norm(reference, one) for n, one in enumerate(contexts)}, states)
    bundle = tmp_path / "bundle"
    made = export(path, bundle, "--target", "vllm", "--quiet")
    assert made.code == 0, made.err
    job: dict[str, object] = {
        "mimo": {
            "main": str(bundle / "main"),
            "draft": str(bundle / "mtp"),
            "states": str(states),
            "contexts": contexts,
            "counts": [len(one) for one in ours],
        }
    }
    script = Path(__file__).with_name("vllm_mimo.py")
    status, log, result = process(script, job, tmp_path / "vllm")
    assert status == 0, log[-3000:]
    assert json.loads(result.read_text())["mimo"] == ours


@torch.inference_mode()
def before_norm(reference: Any, context: list[int]) -> torch.Tensor:
    """Hidden states [T, d] of all but the last token, as the last norm gets them."""
    kept: list[torch.Tensor] = []
    hook = reference.model.norm.register_forward_pre_hook(lambda _, given: kept.append(given[0]))
    reference.model(torch.tensor([context[:-1]]))
    hook.remove()
    return kept[0][0].clone()
