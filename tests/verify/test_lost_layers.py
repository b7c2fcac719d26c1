"""Main layers that config.json announces and that are not there, with the MTP module or without."""

from __future__ import annotations

from pathlib import Path

import pytest

from cases import run_program
from faults.small_model import family_config, write_dense
from verify.foreign import GLM, Config, Tensors, rewritten, without

TOLD = "this is a part of the checkpoint, as a download or a save that was cut off leaves it"


def told(folder: Path) -> str:
    outcome = run_program("verify", folder, "--level", "files")
    assert outcome.code == 7
    return " ".join(outcome.out.split())


@pytest.mark.parametrize("module", [False, True])
def test_a_checkpoint_that_was_cut_off_is_told_first_and_once(module: bool, tmp_path: Path) -> None:
    """No graft mends it, and what else is missing follows from it."""

    def change(stored: Tensors) -> Tensors:
        ends = ("model.layers.1.", "model.layers.2.", "model.norm.", "lm_head.")
        ends += () if module else ("model.layers.3.",)
        return {name: one for name, one in stored.items() if not name.startswith(ends)}

    text = told(rewritten(GLM, tmp_path / "cut", change))
    lost = "main layers 1 and 2, lm_head.weight" + (
        " and model.norm.weight" if module else ", model.norm.weight and the MTP module"
    )
    assert f"announces 3 main layers, and nothing is there of {lost}: {TOLD}" in text
    assert "is missing" not in text and "graft --main" not in text
    assert "num_hidden_layers" not in text  # a smaller model would have a head


def test_where_only_last_layers_lack_the_config_may_be_a_larger_models(tmp_path: Path) -> None:
    def change(config: Config) -> None:
        config["num_hidden_layers"] = 5

    source = rewritten(GLM, tmp_path / "less", without("model.layers.3."), config=change)
    text = told(source)
    assert "nothing is there of main layers 3 and 4 and the MTP module" in text
    assert "the original of these layers says num_hidden_layers 3, put its config.json" in text


def test_a_layer_between_others_is_named(tmp_path: Path) -> None:
    text = told(rewritten(GLM, tmp_path / "gap", without("model.layers.1.")))
    assert "nothing is there of main layer 1: this is a part" in text
    assert "num_hidden_layers" not in text


def test_lost_modules_are_named(tmp_path: Path) -> None:
    folder = write_dense(tmp_path / "step", config=family_config("step3p5"))
    kept = ("model.layers.4.", "model.layers.5.", "model.layers.6.")

    def change(stored: Tensors) -> Tensors:
        return {name: one for name, one in stored.items() if not name.startswith(kept)}

    text = told(rewritten(folder, tmp_path / "lost", change))
    assert "no tensor of any (model.layers.4, model.layers.5, model.layers.6) is there" in text
