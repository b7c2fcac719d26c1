"""Numbers of whole matrices beside nvfp4's scales: of linears that are joined, and reciprocals."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cases import MTP_LAYER, run_program
from faults import planting

Change = Callable[[torch.Tensor], torch.Tensor]
MLP = f"model.layers.{MTP_LAYER}.mlp"
UNLIKE, RECIPROCAL = "have unlike numbers of the whole matrix", "the reciprocal of what its layout"


def verified(bundle: Path, folder: Path, part: str, changes: dict[str, Change]) -> str:
    """Report of a bundle with some tensors changed."""
    shutil.copytree(bundle, folder)
    for name, how in changes.items():
        planting.change(folder / part, name, how)
    outcome = run_program("verify", folder, "--level", "weights", "--json")
    return " ".join((outcome.out + outcome.err).split())


@pytest.mark.parametrize("row", ["nvfp4", "nvfp4 under nvfp4", "modelopt nvfp4 under nvfp4"])
def test_good_bundles_pass(
    row: str, row_bundle: Callable[[str, str], Path], tmp_path: Path
) -> None:
    found = verified(row_bundle(row, "fp8"), tmp_path / "bundle", "mtp", {})
    assert "main: numbers of whole matrices" in found
    assert UNLIKE not in found and RECIPROCAL not in found


@pytest.mark.parametrize(
    ("part", "module"),
    [
        ("mtp", f"{MLP}.experts.1.up_proj"),
        ("mtp", f"{MLP}.shared_experts.gate_proj"),
        ("main", "model.layers.0.mlp.up_proj"),
        ("main", "model.layers.0.self_attn.kv_a_proj_with_mqa"),
    ],
)
def test_joined_linears_with_unlike_numbers(
    part: str, module: str, row_bundle: Callable[[str, str], Path], tmp_path: Path
) -> None:
    name = f"{module}.weight_global_scale"
    changes: dict[str, Change] = {name: lambda one: one * 1.25}
    found = verified(row_bundle("nvfp4", "fp8"), tmp_path / "bundle", part, changes)
    assert UNLIKE in found and "1.25 times too large or small" in found
    assert module.rpartition(".")[0] in found
    assert RECIPROCAL not in found


def test_reciprocals(row_bundle: Callable[[str, str], Path], tmp_path: Path) -> None:
    """Of a whole set, which share it: only the layout tells."""
    names = [f"{MLP}.experts.0.{last}.weight_global_scale" for last in ("gate_proj", "up_proj")]
    changes: dict[str, Change] = dict.fromkeys(names, torch.reciprocal)
    found = verified(row_bundle("nvfp4", "fp8"), tmp_path / "compressed", "mtp", changes)
    assert f"{names[0]} is " in found and RECIPROCAL in found and UNLIKE not in found
    name = "model.layers.0.mlp.down_proj.weight_scale_2"
    bundle = row_bundle("modelopt nvfp4", "fp8")
    found = verified(bundle, tmp_path / "modelopt", "main", {name: torch.reciprocal})
    assert RECIPROCAL in found


def test_a_number_of_another_size_is_no_reciprocal(
    row_bundle: Callable[[str, str], Path], tmp_path: Path
) -> None:
    names = [f"{MLP}.experts.0.{last}.weight_global_scale" for last in ("gate_proj", "up_proj")]
    changes: dict[str, Change] = dict.fromkeys(names, lambda one: one * 1e-6)
    found = verified(row_bundle("nvfp4", "fp8"), tmp_path / "bundle", "mtp", changes)
    assert "has a root mean square of" in found and RECIPROCAL not in found


def test_inputs_of_joined_linears(row_bundle: Callable[[str, str], Path], tmp_path: Path) -> None:
    """Experts may have others than each other, as calibrated ones do."""
    bundle = row_bundle("nvfp4 under nvfp4", "fp8")
    expert = f"{MLP}.experts.0"
    changes: dict[str, Change] = {f"{expert}.up_proj.input_global_scale": lambda one: one * 3}
    found = verified(bundle, tmp_path / "one", "mtp", changes)
    assert "have unlike scales of their inputs, 3 times apart" in found
    changes[f"{expert}.gate_proj.input_global_scale"] = lambda one: one * 3
    assert "unlike scales" not in verified(bundle, tmp_path / "both", "mtp", changes)
