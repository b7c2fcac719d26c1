"""Run as a script under TRITON_INTERPRET=1: a tiny model whose attention and grouped products are
the Triton kernels', interpreted on the CPU in place of a GPU.

    python interpreted_runtime.py CHECKPOINT     compares with the reference kernels; prints JSON
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from mtp_kernels import stored_linear, verify_attention
from mtp_runtime import SamplingParams
from mtp_runtime.models.load import LoadOptions, load_model
from mtp_runtime.models.model import Model
from mtp_runtime.teacher_forcing import DraftInputs, Text, Texts, draft_states, target_states
from runtime.harness import prompts_of, run
from runtime.test_static_graph import RecordedGraphs

PARAMS = SamplingParams(max_tokens=3, ignore_eos=True)
TEXTS = Texts(tuple(Text(tokens, 2) for tokens in prompts_of([7, 4], 96, seed=5)))


@torch.inference_mode()
def results(model: Model, backend: str) -> dict[str, Any]:
    """Tokens of eager and of static steps, and a recursion of drafts over given texts."""
    verify_attention.AUTO["cpu"] = stored_linear.AUTO["cpu"] = backend
    prompts = prompts_of([5, 2], 96)
    tokens = [
        run(model, prompts, PARAMS, method="mtp", k=2, graphs=graphs, max_batch_size=2).outputs
        for graphs in (None, RecordedGraphs())
    ]
    _, after = target_states(model, TEXTS)
    drafts = draft_states(model.mtp_modules, DraftInputs(TEXTS, after, TEXTS.anchors()), 2)
    return {"tokens": tokens, "states": torch.stack([after[:2], *(own[:2] for own in drafts)])}


def main(path: Path) -> None:
    model = load_model(path, LoadOptions(static_graph=True)).model
    wanted, found = (results(model, backend) for backend in ("reference", "triton_cuda"))
    apart = (found["states"] - wanted["states"]).abs().max() / wanted["states"].abs().max()
    print(json.dumps({"wanted": wanted["tokens"], "found": found["tokens"], "apart": float(apart)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
