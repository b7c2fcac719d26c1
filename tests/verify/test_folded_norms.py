"""Norms of a main model that were folded into its linears, as rotations of weights leave them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from cases import run_program
from mtp_export.verify.weights.folded_norms import ITEM
from verify.foreign import GLM, Tensors, rewritten

CONSTANT = "main: no constant tensor"


def folded(layers: Sequence[int], stored: Tensors) -> None:
    """Both norms of some main layers multiply by 1, and what reads them by what they did."""
    for layer in (f"model.layers.{number}." for number in layers):
        for norm, readers in (
            ("input_layernorm", ("q_proj.weight", "k_proj.weight", "v_proj.weight")),
            ("post_attention_layernorm", ("gate_proj.weight", "up_proj.weight", "gate.weight")),
        ):
            weight = stored[f"{layer}{norm}.weight"].float()
            stored[f"{layer}{norm}.weight"].fill_(1)
            for name in stored:
                if name.startswith(layer) and name.endswith(readers):
                    stored[name] = (stored[name].float() * weight).to(torch.bfloat16)


def judged(folder: Path) -> tuple[int, dict[str, dict[str, Any]]]:
    outcome = run_program("verify", folder, "--level", "weights", "--json", "--quiet")
    checks = {check["name"]: check for check in json.loads(outcome.out)["checks"]}
    return outcome.code, {item["name"]: item for item in checks["ledger"]["items"]}


def test_norms_of_every_layer_are_no_failure(tmp_path: Path) -> None:
    code, items = judged(rewritten(GLM, tmp_path / "folded", lambda s: folded(range(3), s)))
    assert code == 0
    assert "6 of " in items[ITEM]["figure"] and items[CONSTANT]["status"] == "pass"


@pytest.mark.parametrize("lost", [0, 2])
def test_norms_of_one_layer_were_lost(lost: int, tmp_path: Path) -> None:
    code, items = judged(rewritten(GLM, tmp_path / "lost", lambda s: folded([lost], s)))
    assert code == 7
    assert ITEM not in items
    assert f"model.layers.{lost}.input_layernorm.weight is constant (1)" in items[CONSTANT]["cause"]
