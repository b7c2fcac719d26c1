"""Qwen's models as mlx-lm keeps them, read as they were released."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cases import run_program
from decoded_mains import write_mlx_qwen
from mtp_checkpoints.tensors.reader import Checkpoint
from quantized_by_others import read_all
from verify.foreign import FIXTURES, Tensors

QWEN = FIXTURES / "qwen3-5-tiny"
FULL = "model.layers.3."  # of attention, as the module's is
NORMS = "mtp: norms as the main model's"


@pytest.mark.parametrize("offset_module", [False, True])
def test_names_and_values_are_the_released_ones(tmp_path: Path, *, offset_module: bool) -> None:
    folder = write_mlx_qwen(QWEN, tmp_path / "mlx", offset_module=offset_module)
    found, wanted = Checkpoint.open(folder), read_all(QWEN)
    plain = {name: one for name, one in wanted.items() if one.dim() != 2}
    for name, one in plain.items():
        own = found.tensor(name.replace("model.", "model.language_model.", 1))
        assert own.shape == one.shape
        # bf16 rounds the sum of one and a number.
        torch.testing.assert_close(own.float(), one.float(), rtol=2**-8, atol=2**-8)
    assert {name for name in found.tensors if name.startswith("mtp.")} == {
        name for name in wanted if name.startswith("mtp.")
    }
    assert not [name for name in found.tensors if "language_model.language_model" in name]
    assert all(name.startswith(("language_model.", "mtp.")) for name in found.written)


def test_a_vision_tower_has_its_released_names(tmp_path: Path) -> None:
    """mlx-vlm takes away what a released name begins with."""
    folder = write_mlx_qwen(QWEN, tmp_path / "mlx")
    stored = load_file(folder / "mtp.safetensors")
    tower = {"vision_tower.blocks.0.norm1.weight": torch.ones(8)}
    save_file(stored | tower, folder / "mtp.safetensors")
    (folder / "model.safetensors.index.json").unlink()
    assert "model.visual.blocks.0.norm1.weight" in Checkpoint.open(folder).tensors
    assert run_program("verify", folder, "--level", "files").code == 0


def as_it_is(_: Tensors) -> None:
    """No change."""


def without_one(mtp: Tensors) -> None:
    for name in mtp:
        if "norm" in name:
            mtp[name] = mtp[name] - 1


def with_one(mtp: Tensors) -> None:
    for name in mtp:
        if name.endswith(("q_norm.weight", "k_norm.weight", "layernorm.weight")):
            mtp[name] = mtp[name] + 1


def main_layer(mtp: Tensors) -> None:
    released = read_all(QWEN)
    for name in mtp:
        if name.startswith("mtp.layers.0."):
            mtp[name] = released[name.replace("mtp.layers.0.", FULL)]


@pytest.mark.parametrize(
    ("offset_module", "change", "failed"),
    [
        (False, as_it_is, set()),
        (True, as_it_is, set()),
        (True, without_one, {NORMS}),
        (False, with_one, {NORMS}),
        (False, main_layer, {"mtp: no main layer in its place"}),
    ],
    ids=["released", "in MLX's form", "released in a file of MLX", "offset", "a main layer"],
)
def test_its_module_is_judged_beside_it(
    tmp_path: Path, change: Callable[[Tensors], None], failed: set[str], *, offset_module: bool
) -> None:
    folder = write_mlx_qwen(QWEN, tmp_path / "mlx", offset_module=offset_module)
    file, kind = folder / "mtp.safetensors", "mlx" if offset_module else "pt"
    mtp = load_file(file)
    change(mtp)
    save_file(mtp, file, metadata={"format": kind})
    outcome = run_program("verify", folder, "--level", "weights", "--json", "--quiet")
    items = [i for check in json.loads(outcome.out)["checks"] for i in check["items"]]
    found = {item["name"]: item["cause"] for item in items if item["status"] == "fail"}
    assert (found.keys(), outcome.code) == (failed, 7 if failed else 0), items
    if NORMS in failed:  # what said that one is to be taken from them is named
        blamed = "metadata of mtp.safetensors say that it is in MLX's format" in found[NORMS]
        assert blamed == offset_module
