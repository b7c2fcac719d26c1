"""Layers that hold the source's weights of other layers, told once with both directions."""

from __future__ import annotations

from pathlib import Path

import pytest

from cases import run_program
from faults.small_model import family_config, write_dense
from verify.foreign import GLM, Tensors, quantized, rewritten

TOLD = "holds the source's"


def moved(**places: int) -> dict[str, str]:
    return {f"model.layers.{own[1:]}.": f"model.layers.{other}." for own, other in places.items()}


def told(source: Path, folder: Path, places: dict[str, str]) -> str:
    """Return the verdict on a checkpoint whose layers are those of others."""

    def change(stored: Tensors) -> Tensors:
        made = dict(stored)
        for own, other in places.items():
            inside = [n.removeprefix(own) for n in stored if n.startswith(own)]
            made |= {own + n: stored[other + n].clone() for n in inside if other + n in stored}
        return made

    rewritten(source, folder, change)
    outcome = run_program("verify", folder, "--level", "weights", "--source", source)
    assert outcome.code == 7
    return " ".join(outcome.out.split())


@pytest.mark.parametrize(
    "places", [moved(_4=6, _6=4), moved(_4=5, _5=6, _6=4)], ids=["two", "turn"]
)
def test_modules_in_another_order_are_told_with_both_directions(
    places: dict[str, str], tmp_path: Path
) -> None:
    source = write_dense(tmp_path / "source", config=family_config("step3p5"))
    text = told(source, tmp_path / "moved", places)
    for own, other in places.items():
        assert f"{own.rstrip('.')} {TOLD} {other.rstrip('.')} (" in text
    assert text.count(TOLD) == len(places) and "is not the source's: it holds" not in text
    assert ("the two are exchanged" in text) == (len(places) == 2)


def test_attention_alone_is_no_layer(tmp_path: Path) -> None:
    """Nor is a layer that another tool quantized."""

    def change(stored: Tensors) -> None:
        for name in list(stored):
            if name.startswith("model.layers.3.self_attn."):
                stored[name] = stored[name.replace("layers.3", "layers.2")].clone()

    folder = rewritten(GLM, tmp_path / "attention", change)
    outcome = run_program("verify", folder, "--level", "weights", "--source", GLM)
    assert outcome.code == 7 and TOLD not in outcome.out
    sound = quantized(GLM, tmp_path / "sound", "awq")
    outcome = run_program("verify", sound, "--level", "weights", "--source", GLM)
    assert TOLD not in outcome.out
