"""Modules of which some tensors were renamed, and that hold a layer of another model's kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from cases import run_program
from verify.foreign import FIXTURES, Tensors, rewritten
from verify.foreign_damages import rename
from verify.foreign_folders import QWEN_NAMES
from verify.foreign_sources import GLM, quantized

QWEN = FIXTURES / "qwen3-5-tiny"


def complete(folder: Path) -> dict[str, Any]:
    """The item that says whether the modules are complete."""
    outcome = run_program("verify", folder, "--level", "files", "--json", "--quiet")
    assert outcome.code == 7
    (files,) = (c for c in json.loads(outcome.out)["checks"] if c["name"] == "files")
    found: dict[str, Any] = {item["name"]: item for item in files["items"]}["MTP modules complete"]
    return found


def test_single_tensors_under_other_names_are_told(tmp_path: Path) -> None:
    others = {"mtp.fc.": "mtp.eh_proj.", "mtp.pre_fc_norm_hidden.": "mtp.hnorm."}

    def change(stored: Tensors) -> None:
        for own, other in others.items():
            stored[f"{other}weight"] = stored.pop(f"{own}weight")

    item = complete(rewritten(QWEN, tmp_path / "renamed", change))
    assert "under other names, by their shapes (2): mtp.eh_proj.weight, mtp.hnorm" in item["cause"]
    assert "where engines look for mtp.pre_fc_norm_hidden.weight, mtp.fc.weight" in item["cause"]
    assert "mtp-export graft" in item["repair"]


@pytest.mark.parametrize("mtp", ["quantized", "unquantized"])
@pytest.mark.parametrize("method", ["auto-round", "gptq", "awq", "compressed-tensors, int4"])
def test_packed_weights_under_other_names_are_told(
    method: str, mtp: Literal["quantized", "unquantized"], tmp_path: Path
) -> None:
    """Whatever the names that lists leave out make of them."""
    checkpoint = quantized(GLM, method, mtp)
    rename(QWEN_NAMES)(checkpoint)
    checkpoint.save(tmp_path / "renamed")
    cause = complete(tmp_path / "renamed")["cause"]
    assert "(41): they begin with mtp.layers.0, where engines look for model.layers.3;" in cause
    assert "; with mtp, where engines look for model.layers.3.shared_head" in cause


def test_experts_in_a_dense_model_are_another_models(tmp_path: Path) -> None:
    def change(stored: Tensors) -> None:
        mlp = "mtp.layers.0.mlp."
        for name in ("gate", "up", "down"):
            del stored[f"{mlp}{name}_proj.weight"]
            stored[f"{mlp}shared_expert.{name}_proj.weight"] = torch.ones(64, 64).bfloat16()
        stored[f"{mlp}gate.weight"] = torch.ones(8, 128).bfloat16()

    item = complete(rewritten(QWEN, tmp_path / "another", change))
    assert "mtp.layers.0.mlp is of another kind than config.json says" in item["cause"]
    assert "it has gate, shared_expert, and lacks down_proj, gate_proj, up_proj" in item["cause"]
    assert "under other names" not in item["cause"]
