"""Halves of eh_proj that were lost, filled in or made far smaller, in formats that tools pack it
in."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cases import nightly_but, run_program
from quantized_by_others import METHODS
from verify.foreign_sources import GLM, Checkpoint, quantized, released

MIDDLE = 128
FORMATS = ("bf16", "awq", "fp8", "compressed-tensors, int4", "modelopt nvfp4", "gptq", "auto-round")
HALVES = (
    ("the first half", "(0 to 127), which takes the embedding,"),
    (
        "the second half",
        "(128 to 255), which takes the hidden state,",
    ),
)
Change = Callable[[torch.Tensor], torch.Tensor]


def few_left(half: torch.Tensor) -> torch.Tensor:
    found = torch.zeros_like(half)
    found[::3, ::9] = 0.01
    return found


CHANGES: dict[str, tuple[Change, str]] = {
    "zero": (torch.zeros_like, "is zero|rounded to zero"),
    "a constant": (lambda half: torch.full_like(half, 0.02), "has one value or size"),
    "of one size": (lambda half: half.sign() * 0.05, "has one value or size"),
    "nearly zero": (lambda half: 1e-4 * half, "times smaller than the other"),
    "of few values": (few_left, "nearly all zero|rounded to zero"),
}


def packed(form: str, change: Callable[[torch.Tensor], object]) -> Checkpoint:
    """GLM's miniature in a format, eh_proj too, changed before it was quantized."""
    weight = released(GLM).of("eh_proj.weight").float()
    change(weight)
    if form == "bf16":
        found = released(GLM)
        found.set("eh_proj.weight", weight.bfloat16())
        return found
    found = quantized(GLM, form, "quantized")
    del found.tensors[f"{found.layer}eh_proj.weight"]
    for last, tensor in METHODS[form].encode(weight)[0].items():
        found.set(f"eh_proj.{last}", tensor)
    return found


def of_eh_proj(checkpoint: Checkpoint, folder: Path) -> list[dict[str, Any]]:
    """Failed items of level weights about eh_proj."""
    checkpoint.save(folder)
    outcome = run_program("verify", folder, "--level", "weights", "--json", "--quiet")
    checks = {check["name"]: check for check in json.loads(outcome.out)["checks"]}
    items = [item for item in checks["ledger"]["items"] if item["status"] == "fail"]
    assert all("eh_proj" in item["subject"] for item in items)
    return items


@pytest.mark.parametrize("side", [0, 1], ids=["embedding", "hidden state"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("form", nightly_but(FORMATS[:3], FORMATS))
def test_a_half_that_was_lost_is_named_once(
    form: str, change: str, side: int, tmp_path: Path
) -> None:
    make, words = CHANGES[change]
    columns = slice(side * MIDDLE, (side + 1) * MIDDLE)

    def damage(weight: torch.Tensor) -> None:
        weight[:, columns] = make(weight[:, columns])

    (item,) = of_eh_proj(packed(form, damage), tmp_path / "damaged")
    assert item["name"] == "mtp: halves of eh_proj"
    assert all(words in item["cause"] for words in HALVES[side])
    assert any(one in item["cause"] for one in words.split("|"))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("times", [1, 30])
def test_halves_that_differ_as_released_ones_do_are_good(
    form: str, times: int, tmp_path: Path
) -> None:
    def larger(weight: torch.Tensor) -> None:
        weight[:, MIDDLE:] *= times

    assert not of_eh_proj(packed(form, larger), tmp_path / "good")


def test_scales_that_both_halves_share_are_blamed_alone(tmp_path: Path) -> None:
    """Scales of groups lie in one half each."""

    def zero(weight: torch.Tensor) -> None:
        weight[:, :MIDDLE] = 0

    for form, shared in (("compressed-tensors, int4", False), ("compressed-tensors, int8", True)):
        (item,) = of_eh_proj(packed(form, zero), tmp_path / form)
        assert ("a scale that both share" in item["cause"]) == shared
