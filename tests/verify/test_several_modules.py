"""Models of several MTP layers, of which one, some or all are there under other names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from cases import run_program
from faults.small_model import family_config, write_dense
from mtp_checkpoints.families import family_of
from verify.foreign import Config, Tensors, rewritten

SEVERAL = ("deepseek_v3", "mimo", "mimo_v2_flash", "ernie4_5_moe", "step3p5")
FROM_ONE = ("mimo_v2_flash", "deepseek_v4")  # whose own names count from zero


def model_of(model_type: str) -> Config:
    """A config with three modules, as its family has them, or two."""
    config = family_config(model_type)
    if len(family_of(config).mtp) == 1:
        config |= {"num_nextn_predict_layers": 2}
    return config


def told(
    model_type: str, tmp_path: Path, other: Callable[[str, int], str]
) -> tuple[str, dict[str, str], dict[str, str]]:
    """The only cause, and the pairs of names that it has and should have. other: the name of a
    module by its own and its place."""
    config, pairs = model_of(model_type), dict[str, str]()
    places = {module.name: n for n, module in enumerate(family_of(config).mtp)}

    def change(stored: Tensors) -> Tensors:
        def named(name: str) -> str:
            own = next((one for one in places if name.startswith(f"{one}.")), "")
            new = other(own, places[own]) + name[len(own) :] if own else name
            if new != name:
                pairs[new] = name
            return new

        return {named(name): one for name, one in stored.items()}

    dense = write_dense(tmp_path / "dense", config=config)
    folder = rewritten(dense, tmp_path / "renamed", change)
    outcome = run_program("verify", folder, "--level", "files", "--json", "--quiet")
    assert outcome.code == 7
    report = json.loads(outcome.out)
    (cause,) = report["causes"]
    items = [item for check in report["checks"] for item in check["items"]]
    renamed = [item["data"]["renamed"] for item in items if "renamed" in item["data"]]
    return cause["text"], {k: v for one in renamed for k, v in one.items()}, pairs


@pytest.mark.parametrize("model_type", SEVERAL)
@pytest.mark.parametrize("place", [0, 1])
def test_a_module_under_another_name_is_not_lost(
    model_type: str, place: int, tmp_path: Path
) -> None:
    text, found, pairs = told(model_type, tmp_path, lambda own, n: "aux.5" if n == place else own)
    assert f"under other names ({len(pairs)}): {len(pairs)} begin with aux" in text
    assert found == pairs and "lost" not in text


@pytest.mark.parametrize("model_type", SEVERAL)
def test_a_module_far_behind_the_others_leaves_them_their_numbers(
    model_type: str, tmp_path: Path
) -> None:
    def other(own: str, place: int) -> str:
        return own if place else f"{own.rpartition('.')[0]}.43"

    text, found, pairs = told(model_type, tmp_path, other)
    assert f"under other names ({len(pairs)})" in text and found == pairs


@pytest.mark.parametrize("model_type", FROM_ONE)
def test_modules_that_are_counted_from_one_keep_their_order(
    model_type: str, tmp_path: Path
) -> None:
    """Under names of another beginning: each number but the last is that of another module."""
    _, found, pairs = told(model_type, tmp_path, lambda _, n: f"mtp.layers.{n + 1}")
    assert found == pairs
