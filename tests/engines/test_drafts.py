"""vLLM's own classes load every tensor of our drafts, EAGLE-1, EAGLE-3 and Medusa, and accept as
many as our runtime does on the same text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from comparison import check_acceptance, check_log, check_text, compare
from engine_runs import FIXTURE, Prompts, process, read_with_ours, run_vllm, vllm_job
from safetensors.torch import load_file

from cases import quantize
from faults.fitted_drafts import write_fitted_eagle3, write_fitted_heads
from mtp_checkpoints.families.eagle3 import eagle3_config
from mtp_export.verify.evidence.corpus import Corpus
from mtp_runtime.models.load import LoadOptions, load_model
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


@pytest.fixture(scope="module")
def bundle(prompts: Prompts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fixture for vLLM's EAGLE, with drafts of the other kinds that are fitted to its texts."""
    output = tmp_path_factory.mktemp("fitted") / "bundle"
    pair = ("--base-quant", "bf16", "--mtp-quant", "bf16", "--quiet")
    assert quantize(FIXTURE, output, *pair, "--target", "eagle").code == 0
    corpus = Corpus(load_model(output, LoadOptions()).model, tuple(map(tuple, prompts)), 24)
    write_fitted_eagle3(output / "eagle3", corpus)
    write_fitted_heads(output / "parallel_heads", corpus)
    return output


@pytest.mark.parametrize(
    ("ours", "theirs", "folder"),
    [
        ("eagle", "eagle", "mtp"),
        ("eagle3", "eagle3", "eagle3"),
        ("parallel_heads", "medusa", "parallel_heads"),
    ],
)
def test_vllm_accepts_as_many_drafts(
    ours: str,
    theirs: str,
    folder: str,
    bundle: Path,
    prompts: Prompts,
    tmp_path: Path,
    figures: dict[str, Any],
) -> None:
    job = vllm_job(bundle, 2, prompts) | {"method": theirs, "mtp": str(bundle / folder)}
    outputs, log = run_vllm(job, tmp_path / "run")
    reading = read_with_ours(bundle, 2, prompts, outputs.tokens, ours)
    measured = compare(outputs, reading)
    figures[f"2, {theirs}"] = measured.as_json()
    print(theirs, measured.theirs, [share.value for share in measured.ours])
    check_text(measured)
    check_acceptance(measured)
    check_log(log)
