"""vLLM's own classes load every tensor of our drafts: EAGLE-1, EAGLE-3 and Medusa."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from engine_runs import FIXTURE, process
from safetensors.torch import load_file

from cases import quantize
from mtp_export.families.eagle3 import eagle3_config
from runtime.drafts import eagle3_tensors, ffn_layout, save_draft, write_heads

SHARED = {"model.embed_tokens.weight"}  # vLLM takes the target's


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("drafts")
    pair = ("--base-quant", "bf16", "--mtp-quant", "bf16", "--quiet")
    assert quantize(FIXTURE, folder / "bundle", *pair, "--target", "eagle").code == 0
    config = json.loads((FIXTURE / "config.json").read_text())
    own = eagle3_config(config, (2, 30, 58), 512)
    tensors = {
        name: one.bfloat16() if one.is_floating_point() else one
        for name, one in eagle3_tensors(own).items()
    }
    sizes = {"hidden": config["hidden_size"], "vocab": config["vocab_size"]}
    return {
        "main": folder / "bundle/main",
        "eagle": folder / "bundle/mtp",
        "eagle3": save_draft(folder / "eagle3", own, tensors),
        "medusa": write_heads(folder / "medusa", ffn_layout(**sizes, own_projections=True)),
    }


@pytest.fixture(scope="module")
def loadings(
    drafts: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    job = {
        method: {"main": str(drafts["main"]), "draft": str(folder), "method": method}
        for method, folder in drafts.items()
        if method != "main"
    }
    script = Path(__file__).with_name("vllm_drafts.py")
    status, log, result = process(script, job, tmp_path_factory.mktemp("vllm"))
    assert status == 0, log[-3000:]
    found: dict[str, dict[str, Any]] = json.loads(result.read_text())
    return found


CLASSES = {
    "eagle": "EagleDeepseekV3ForCausalLM",
    "eagle3": "Eagle3DeepseekV2ForCausalLM",
    "medusa": "Medusa",
}


@pytest.mark.parametrize("method", CLASSES)
def test_vllm_loads_every_tensor(
    method: str, drafts: dict[str, Path], loadings: dict[str, dict[str, Any]]
) -> None:
    found = loadings[method]
    assert found["class"] == CLASSES[method]
    assert set(found["untouched"]) <= (SHARED if method == "eagle3" else set())
    stored = sum(
        tensor.numel()
        for path in drafts[method].glob("*.safetensors")
        for name, tensor in load_file(path).items()
        if name != "t2d"
    )
    assert found["elements"] == stored
