"""Shapes of MTP tensors of a model that has no family here, beside the main layers'."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from cases import run_program
from verify.foreign import GLM, GLM_MTP, Tensors, rewritten
from verify.test_unnamed_values import unknown

ITEM = "MTP tensors in the main layers' shapes"
FUSED = "mlp.experts.gate_up_proj"


def with_fused_experts(stored: Tensors) -> None:
    """A tensor of all experts in each layer, as transformers 5 saves them."""
    for layer in range(4):
        stored[f"model.layers.{layer}.{FUSED}"] = torch.rand(8, 6, 4).bfloat16()


def judged(stored_as: Any, folder: Path) -> tuple[int, dict[str, Any]]:
    """The exit code at level files, and its items by name."""
    written = rewritten(GLM, folder, stored_as, unknown)
    outcome = run_program("verify", written, "--level", "files", "--json", "--quiet")
    (files,) = (c for c in json.loads(outcome.out)["checks"] if c["name"] == "files")
    return outcome.code, {item["name"]: item for item in files["items"]}


@pytest.mark.parametrize(("name", "axes"), [(FUSED, (1, 2)), ("self_attn.k_proj.weight", (0, 1))])
def test_a_transposed_one_fails(name: str, axes: tuple[int, int], tmp_path: Path) -> None:
    def transposed(stored: Tensors) -> None:
        with_fused_experts(stored)
        own = stored[GLM_MTP + name]
        stored[GLM_MTP + name] = own.transpose(*axes).contiguous()

    code, items = judged(transposed, tmp_path / "transposed")
    assert code == 7
    assert items[ITEM]["subject"] == GLM_MTP + name
    assert "is stored transposed" in items[ITEM]["cause"]
    assert [one["name"] for one in items.values() if one["status"] == "fail"] == [ITEM]


def test_another_shape_is_not_tested(tmp_path: Path) -> None:
    """A module may be narrower than the main layers."""

    def narrower(stored: Tensors) -> None:
        name = f"{GLM_MTP}self_attn.k_proj.weight"
        stored[name] = stored[name][:32].contiguous()

    code, items = judged(narrower, tmp_path / "narrower")
    assert (code, items[ITEM]["status"]) == (0, "not tested")
    assert "k_proj.weight is [32, 128], and every main layer's" in items[ITEM]["cause"]


def test_main_layers_of_several_shapes_say_nothing(tmp_path: Path) -> None:
    def mixed(stored: Tensors) -> None:
        with_fused_experts(stored)
        stored[f"model.layers.0.{FUSED}"] = torch.rand(8, 4, 6).bfloat16()

    code, items = judged(mixed, tmp_path / "mixed")
    _, plain = judged(with_fused_experts, tmp_path / "plain")
    assert (code, items[ITEM]["status"], plain[ITEM]["status"]) == (0, "pass", "pass")
    counts = [int(one[ITEM]["figure"].split()[0]) for one in (items, plain)]
    assert counts[0] == counts[1] - 1
