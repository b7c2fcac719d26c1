"""Norms that were folded into linears, as rotations of weights leave them, and scales of channels
that were moved there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from cases import run_program
from mtp_export.verify.weights.folded_norms import ITEM
from verify.foreign import GLM, GLM_MTP, Tensors, rewritten

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
    assert "6 of " in items[f"main: {ITEM}"]["figure"] and items[CONSTANT]["status"] == "pass"


@pytest.mark.parametrize("lost", [0, 2])
def test_norms_of_one_layer_were_lost(lost: int, tmp_path: Path) -> None:
    code, items = judged(rewritten(GLM, tmp_path / "lost", lambda s: folded([lost], s)))
    assert code == 7
    assert f"main: {ITEM}" not in items
    assert f"model.layers.{lost}.input_layernorm.weight is constant (1)" in items[CONSTANT]["cause"]


def with_the_module(stored: Tensors) -> None:
    """All norms but the last ones, eh_proj's inputs too."""
    folded(range(4), stored)
    projection = stored[f"{GLM_MTP}eh_proj.weight"].float()
    for half, norm in zip(projection.chunk(2, 1), ("enorm", "hnorm"), strict=True):
        half *= stored[f"{GLM_MTP}{norm}.weight"].float()
        stored[f"{GLM_MTP}{norm}.weight"].fill_(1)
    stored[f"{GLM_MTP}eh_proj.weight"] = projection.to(torch.bfloat16)


def test_a_module_may_be_folded_as_its_main_model_is(tmp_path: Path) -> None:
    code, items = judged(rewritten(GLM, tmp_path / "folded", with_the_module))
    assert code == 0
    assert "4 of " in items[f"mtp: {ITEM}"]["figure"]


def test_norms_of_a_module_beside_a_main_model_that_is_not_folded_were_lost(
    tmp_path: Path,
) -> None:
    def alone(stored: Tensors) -> None:
        folded([3], stored)

    code, items = judged(rewritten(GLM, tmp_path / "lost", alone))
    assert code == 7 and items["mtp: no constant tensor"]["status"] == "fail"


def test_a_module_without_the_main_models_scales_of_channels_passes(tmp_path: Path) -> None:
    """SmoothQuant moves them from norms into linears, of the main layers alone."""

    def smoothed(stored: Tensors) -> None:
        for name in [*stored]:
            if name.endswith("layernorm.weight") and not name.startswith(GLM_MTP):
                layer = ".".join(name.split(".")[:3])
                attention = name.endswith("input_layernorm.weight")
                last = (
                    ("q_proj", "k_proj", "v_proj")
                    if attention
                    else ("gate_proj", "up_proj", "gate")
                )
                stored[name] = stored[name] / 16
                for one in stored:
                    if one.startswith(f"{layer}.") and one.split(".")[-2] in last:
                        stored[one] = stored[one] * (1 if one.endswith("bias") else 16)

    assert judged(rewritten(GLM, tmp_path / "smoothed", smoothed))[0] == 0
