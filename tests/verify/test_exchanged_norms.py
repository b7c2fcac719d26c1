"""A norm of the MTP layer that a main layer holds, and that layer's in its place."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cases import nightly_but, run_program
from verify.foreign_folders import listed
from verify.foreign_sources import DEEPSEEK, FIXTURES, GLM, Checkpoint, released

ITEM = "mtp: no norm is exchanged with a main layer's"
NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight")


def exchange(checkpoint: Checkpoint, norm: str, layer: int) -> None:
    """Exchange a norm of the MTP layer with a main layer's."""
    own, other = checkpoint.layer + norm, f"model.layers.{layer}.{norm}"
    tensors = checkpoint.tensors
    tensors[own], tensors[other] = tensors[other], tensors[own]


def smooth(checkpoint: Checkpoint, layers: str) -> None:
    """Move scales of channels into the norms of some layers, from the columns that read them."""
    for name, norm in list(checkpoint.tensors.items()):
        if not name.endswith(NORMS) or not re.search(layers, name):
            continue
        prefix = name.rpartition("layernorm")[0].rpartition(".")[0]
        part = f"{prefix}.{'self_attn' if 'input' in name else 'mlp'}."
        factors = norm.float().abs() ** -2  # more than took part in training
        checkpoint.tensors[name] = (norm.float() * factors).to(norm.dtype)
        for linear, weight in checkpoint.tensors.items():
            if linear.startswith(part) and weight.dim() == 2 and weight.shape[1] == len(norm):
                checkpoint.tensors[linear] = (weight.float() / factors).to(weight.dtype)


def judged(folder: Path) -> tuple[int, dict[str, Any]]:
    """The exit code, and the item."""
    outcome = run_program("verify", folder, "--level", "weights", "--json", "--quiet")
    (ledger,) = (c for c in json.loads(outcome.out)["checks"] if c["name"] == "ledger")
    return outcome.code, {item["name"]: item for item in ledger["items"]}[ITEM]


STARTS: dict[str, Callable[[], Checkpoint]] = {
    "bf16": lambda: released(GLM),
    "AWQ": listed("awq"),
    "int4": listed("compressed-tensors, int4"),
    "fp8": listed("fp8"),
}
EXCHANGES = [(start, norm, layer) for start in STARTS for norm in NORMS for layer in range(3)]


@pytest.mark.parametrize(
    ("start", "norm", "layer"),
    nightly_but([("AWQ", NORMS[0], 1)], EXCHANGES),
)
def test_an_exchanged_norm_is_named(start: str, norm: str, layer: int, tmp_path: Path) -> None:
    checkpoint = STARTS[start]()
    exchange(checkpoint, norm, layer)
    checkpoint.save(tmp_path / "exchanged")
    code, item = judged(tmp_path / "exchanged")
    assert (code, item["status"]) == (7, "fail")
    assert item["subject"] == f"{checkpoint.layer}{norm}"
    assert f"and model.layers.{layer}.{norm} are exchanged" in item["cause"]


@pytest.mark.nightly
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("layer", [0, 20, 60])
def test_one_is_named_among_61_layers(norm: str, layer: int, tmp_path: Path) -> None:
    checkpoint = released(DEEPSEEK)
    exchange(checkpoint, norm, layer)
    checkpoint.save(tmp_path / "exchanged")
    assert f"model.layers.{layer}.{norm} are" in judged(tmp_path / "exchanged")[1]["cause"]


@pytest.mark.nightly
@pytest.mark.parametrize("source", [GLM, DEEPSEEK, FIXTURES / "qwen3-5-tiny"])
def test_a_good_checkpoint_passes(source: Path) -> None:
    item = judged(source)[1]
    assert (item["status"], item["figure"]) == ("pass", "2 norms, fit better by 0.00")


@pytest.mark.parametrize(
    ("layers", "status"),
    nightly_but(
        [(r"layers\.\d", "not tested")],
        [(r"layers\.\d", "not tested"), (r"layers\.[0-2]", "not tested"), (r"layers\.3", "pass")],
    ),
)
def test_norms_that_took_up_scales_are_not_exchanged(
    layers: str, status: str, tmp_path: Path
) -> None:
    checkpoint = released(GLM)
    smooth(checkpoint, layers)
    checkpoint.save(tmp_path / "smooth")
    code, item = judged(tmp_path / "smooth")
    assert (code, item["status"]) == (0, status)
