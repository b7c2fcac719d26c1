"""Faults planted into the MTP part show in vLLM as the verification design says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_runs import (
    VLLM,
    Prompts,
    Tensors,
    bundle_of,
    damaged_draft,
    process,
    read_with_ours,
    run_vllm,
    vllm_job,
)

from cases import run_program

LAYER = "model.layers.61."


def reversed_concatenation(tensors: Tensors) -> Tensors:
    weight = tensors[f"{LAYER}eh_proj.weight"]
    half = weight.shape[1] // 2
    swapped = torch.cat([weight[:, half:], weight[:, :half]], dim=1)
    return tensors | {f"{LAYER}eh_proj.weight": swapped}


def without(name: str, tensors: Tensors) -> Tensors:
    return {key: value for key, value in tensors.items() if key != LAYER + name}


def layer_0_names(tensors: Tensors) -> Tensors:
    return {key.replace(LAYER, "model.layers.0."): value for key, value in tensors.items()}


def test_reversed_concatenation_is_not_refused_and_collapses(
    bf16: Path, prompts: Prompts, tmp_path: Path
) -> None:
    """Nothing fails, the text stays right, and acceptance falls to what ours measures."""
    draft = damaged_draft(bf16 / "mtp", tmp_path / "draft", reversed_concatenation)
    outputs, _ = run_vllm(vllm_job(bf16 / "main", draft, 1, prompts), tmp_path / "run")
    good = read_with_ours(bf16, 1, prompts, outputs.tokens).acceptance[0]
    bundle = bundle_of(tmp_path / "bundle", bf16 / "main", draft)
    damaged = read_with_ours(bundle, 1, prompts, outputs.tokens).acceptance[0]
    print(f"sound {good:.3f}, reversed {damaged:.3f}, in vLLM {outputs.acceptance[0]:.3f}")
    assert outputs.acceptance[0] < good / 2
    assert abs(outputs.acceptance[0] - damaged) <= 0.03


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        pytest.param(lambda t: without("hnorm.weight", t), "hnorm", id="a tensor is missing"),
        pytest.param(layer_0_names, "MTP", id="layer 0 names under a config that says 61"),
    ],
)
def test_vllm_refuses_what_our_loader_refuses(
    damage: object, says: str, bf16: Path, prompts: Prompts, tmp_path: Path
) -> None:
    draft = damaged_draft(bf16 / "mtp", tmp_path / "draft", damage)  # type: ignore[arg-type]
    status, log, _ = process(VLLM, vllm_job(bf16 / "main", draft, 1, prompts), tmp_path / "run")
    assert status != 0
    assert says in log
    bundle = bundle_of(tmp_path / "bundle", bf16 / "main", draft)
    refused = run_program("generate", bundle, "--prompt", "def", "--speculate-method", "mtp")
    assert refused.code == 3, refused.err
