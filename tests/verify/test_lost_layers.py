"""Main layers that config.json announces and that are not there, with the MTP module or without."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cases import run_program
from faults.small_model import family_config, write_dense
from verify import foreign_sources
from verify.foreign import GLM, GLM_MTP, Config, Tensors, rewritten, without

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


@pytest.mark.parametrize("numbers", [(4, 5, 6), (5,), (5, 6)])
def test_lost_modules_are_named(numbers: tuple[int, ...], tmp_path: Path) -> None:
    """And that config.json may count too many where those that are there come first alone."""
    folder = write_dense(tmp_path / "step", config=family_config("step3p5"))
    lost = [f"model.layers.{number}" for number in numbers]
    text = told(rewritten(folder, tmp_path / "lost", without(*(f"{one}." for one in lost))))
    if len(numbers) == 3:
        assert f"no tensor of any ({', '.join(lost)}) is there" in text
    else:
        assert f"({', '.join(lost)} {'is' if len(lost) == 1 else 'are'} missing): the" in text
    assert ("num_nextn_predict_layers is to be 1" in text) == (numbers == (5, 6))
    assert "is to be 2" not in text


def test_a_count_of_none_is_quoted_as_it_is(tmp_path: Path) -> None:
    def change(config: Config) -> None:
        config["num_nextn_predict_layers"] = 0

    text = told(rewritten(GLM, tmp_path / "none", config=change))
    assert "says num_nextn_predict_layers 0, and all tensors are stored as by 1: set" in text
    assert "would serve without speculation" in text


def test_an_expert_without_scales_is_told_once(tmp_path: Path) -> None:
    def change(stored: Tensors) -> Tensors:
        lost = re.compile(re.escape(f"{GLM_MTP}mlp.experts.5.") + ".*scale")
        return {name: one for name, one in stored.items() if not lost.match(name)}

    checkpoint = foreign_sources.quantized(GLM, "compressed-tensors, int4", "quantized")
    checkpoint.save(tmp_path / "whole")
    text = told(rewritten(tmp_path / "whole", tmp_path / "lost", change))
    assert "experts.5 lacks down_proj.weight_scale, gate_proj.weight_scale, up_proj.weight" in text
    assert "no scale is beside it" not in text
