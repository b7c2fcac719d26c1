"""vLLM's class of Gemma-4's assistants loads every tensor of them, beside their target."""

from __future__ import annotations

import json
from pathlib import Path

from engine_runs import process
from safetensors.torch import load_file

from mtp_checkpoints.families import family_of
from runtime.gemma import CLASSES, VOCAB, write_assistant, write_target

HEADS = {"head_dim": 32, "global_head_dim": 64}  # that vLLM's attention has on a CPU
IDS = "masked_embedding.token_ordering"  # no parameter
PADDED = -VOCAB % 64  # rows of zeros of the embedding, as vLLM makes it


def test_vllm_loads_every_tensor(tmp_path: Path) -> None:
    job: dict[str, object] = {}
    for kind in CLASSES:
        target, assistant = tmp_path / kind / "target", tmp_path / kind / "assistant"
        write_target(target, kind, **HEADS)
        write_assistant(assistant, kind, **HEADS)
        job[kind] = {"main": str(target), "draft": str(assistant), "method": "mtp"}
    script = Path(__file__).with_name("vllm_drafts.py")
    status, log, result = process(script, job, tmp_path / "vllm")
    assert status == 0, log[-3000:]
    for kind, found in json.loads(result.read_text()).items():
        folder = tmp_path / kind / "assistant"
        assert (found["class"], found["untouched"]) == ("Gemma4MTP", [])
        tensors = load_file(folder / "model.safetensors")
        spec = family_of(json.loads((folder / "config.json").read_text()))
        assert tensors.keys() == spec.tensors.keys()
        no_parameters = {IDS, *(name for name in tensors if name.endswith("layer_scalar"))}
        stored = sum(
            tensor.numel() for name, tensor in tensors.items() if name not in no_parameters
        )
        assert found["elements"] == stored + PADDED * spec.facts.hidden
