"""Faults planted into the MTP part: vLLM does with them what `mtp-export verify` says of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from comparison import POINTS, check_acceptance, check_log, check_text, compare
from engine_runs import (
    FIXTURE,
    TOKENS,
    VLLM,
    Outputs,
    Prompts,
    process,
    read_with_ours,
    run_vllm,
    vllm_job,
)

from cases import run_program
from faults import planting
from faults.run_faults import MTP, concatenation_reversed

Checks = dict[str, dict[str, Any]]
REVERSED = "the concatenation is reversed"


def planted(sound: Path, folder: Path, plant: Callable[[Path], None]) -> Path:
    """A copy of a bundle with a fault that its manifest agrees with."""
    bundle = Path(shutil.copytree(sound, folder))
    plant(bundle)
    return bundle


def verified(bundle: Path, *options: object) -> Checks:
    """The checks of a bundle that must not pass, each with its items by name."""
    outcome = run_program("verify", bundle, "--json", "--quiet", *options)
    assert outcome.code == 7, outcome.err
    checks = json.loads(outcome.out)["checks"]
    return {
        check["name"]: check | {"items": {item["name"]: item for item in check["items"]}}
        for check in checks
    }


def test_reversed_concatenation(
    bf16: Path,
    prompts: Prompts,
    tmp_path: Path,
    sound_run: Callable[[int], tuple[Outputs, str]],
    figures: dict[str, Any],
) -> None:
    """verify finds every tensor in place and the text unchanged, names eh_proj, and measures what
    is left of acceptance and what is lost. vLLM loads the bundle without a word of a weight, writes
    the same text, and accepts as few."""
    bundle = planted(bf16, tmp_path / "bundle", concatenation_reversed)
    asked = tmp_path / "prompts.jsonl"
    asked.write_text("".join(json.dumps({"prompt_token_ids": ids}) + "\n" for ids in prompts))
    run = ("--prompts", asked, "--max-new-tokens", TOKENS, "--k", 1)
    checks = verified(bundle, "--source", FIXTURE, *run)
    outputs, log = run_vllm(vllm_job(bundle, 1, prompts), tmp_path / "run")

    assert {name: checks[name]["status"] for name in ("files", "ledger")} == {
        "files": "pass",
        "ledger": "pass",
    }
    check_log(log)

    assert checks["greedy"]["status"] == "pass"
    measured = compare(outputs, read_with_ours(bundle, 1, prompts, outputs.tokens))
    figures["1, concatenation reversed"] = measured.as_json()
    check_text(measured)
    check_acceptance(measured)

    wrong = [item for item in checks["weights"]["items"].values() if item["status"] == "fail"]
    assert [item["subject"] for item in wrong] == [f"{MTP}.eh_proj.weight"]
    says = checks["acceptance"]["items"]
    assert REVERSED in says["no other layout drafts better"]["cause"]
    expected = says["k=1, draft 1"]["data"]["cumulative"]
    change = checks["differential"]["items"]["acceptance change, draft 1"]["data"]["change"]
    lost = outputs.acceptance[0] - sound_run(1)[0].acceptance[0]
    figures["1, concatenation reversed"] |= {
        "vllm_change": lost,
        "verify": expected,
        "verify_change": change,
    }
    assert expected["low"] - POINTS <= outputs.acceptance[0] <= expected["high"] + POINTS
    assert change["low"] - POINTS <= lost <= change["high"] + POINTS


def norm_missing(bundle: Path) -> None:
    planting.write(bundle / "mtp", {f"{MTP}.hnorm.weight": None})


def expert_missing(bundle: Path) -> None:
    names = planting.names(bundle / "mtp", f"{MTP}.mlp.experts.3.")
    planting.write(bundle / "mtp", dict.fromkeys(names))


def layer_0_names(bundle: Path) -> None:
    """Write the names that LightLLM expects, with a config that vLLM expects."""
    folder = bundle / "mtp"
    names = planting.names(folder, f"{MTP}.")
    moved = {name.replace(MTP, "model.layers.0"): planting.read(folder, name) for name in names}
    planting.write(folder, dict.fromkeys(names) | moved)


def stray_scale(bundle: Path) -> None:
    planting.write(bundle / "mtp", {f"{MTP}.eh_proj.weight_scale_inv": torch.ones(1, 1)})


@pytest.mark.parametrize(
    ("plant", "item", "says", "vllm"),
    [
        pytest.param(
            norm_missing, "tensors", f"{MTP}.hnorm.weight is missing",
            f"not initialized from checkpoint: {{'{MTP}.hnorm.weight'}}", id="a tensor is missing",
        ),
        pytest.param(
            layer_0_names, "tensors", f"{MTP}.enorm.weight is missing",
            "layer 61 weights missing from checkpoint", id="layer 0 names",
        ),
        pytest.param(
            stray_scale, "precision on disk", "engines fail on it",
            f"KeyError: '{MTP}.eh_proj.weight_scale_inv'", id="a scale beside eh_proj",
        ),
    ],
)  # fmt: skip
def test_vllm_does_not_start_on_what_level_files_refuses(
    plant: Callable[[Path], None],
    item: str,
    says: str,
    vllm: str,
    bf16: Path,
    prompts: Prompts,
    tmp_path: Path,
) -> None:
    """Both name the same tensors."""
    bundle = planted(bf16, tmp_path / "bundle", plant)
    problems = verified(bundle, "--level", "files")["files"]["items"][f"mtp: {item}"]["data"]
    assert [problem for problem in problems["problems"] if says in problem["words"]], problems
    status, log, _ = process(VLLM, vllm_job(bundle, 1, prompts), tmp_path / "run")
    assert status != 0
    assert vllm in log, log[-3000:]
    assert_ours_refuses(bundle)


def test_vllm_does_not_see_a_missing_expert(bf16: Path, prompts: Prompts, tmp_path: Path) -> None:
    """Tensors are named by verify; vLLM decodes with uninitialized memory in the expert."""
    bundle = planted(bf16, tmp_path / "bundle", expert_missing)
    problems = verified(bundle, "--level", "files")["files"]["items"]["mtp: tensors"]["data"]
    missing = {problem["subject"] for problem in problems["problems"]}
    expert = f"{MTP}.mlp.experts.3"
    assert missing == {f"{expert}.{name}_proj.weight" for name in ("gate", "up", "down")}
    _, log = run_vllm(vllm_job(bundle, 1, prompts[:1]), tmp_path / "run")
    check_log(log)
    assert_ours_refuses(bundle)


def assert_ours_refuses(bundle: Path) -> None:
    refused = run_program("generate", bundle, "--prompt", "def", "--speculate-method", "mtp")
    assert refused.code == 3, refused.err
