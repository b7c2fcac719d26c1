"""Norms of a module and of one main layer beside those of the main layers."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from verify.foreign import FIXTURES, GLM, GLM_MTP, Tensors, rewritten
from verify.test_mtp_values import failures

QWEN = FIXTURES / "qwen3-5-tiny"
SIZES, LAYERS = "mtp: norms as large as the main layers'", "main: norms of the layers alike"


def changed(change: Callable[[Tensors, str], None], *names: str) -> Callable[[Tensors], None]:
    def of(stored: Tensors) -> None:
        for name in names:
            change(stored, name)

    return of


@pytest.mark.parametrize("factor", [30, 1 / 30], ids=["larger", "smaller"])
def test_a_norm_of_another_size_is_named_with_its_factor(factor: float, tmp_path: Path) -> None:
    name = f"{GLM_MTP}self_attn.k_norm.weight"

    def multiply(stored: Tensors, name: str) -> None:
        stored[name] = stored[name] * factor

    found = failures(rewritten(GLM, tmp_path / "damaged", changed(multiply, name)))
    words = found[SIZES]["cause"]
    told = float(words.removeprefix(f"{name} is ").partition(" ")[0])
    assert math.isclose(told, factor, rel_tol=0.3)


def test_a_norm_that_engines_add_one_to_is_not_one_too_large_at_twenty_times_its_size(
    tmp_path: Path,
) -> None:
    name = "mtp.layers.0.input_layernorm.weight"

    def multiply(stored: Tensors, name: str) -> None:
        stored[name] = (stored[name].float() + 1) * 20 - 1

    (item,) = failures(rewritten(QWEN, tmp_path / "damaged", changed(multiply, name))).values()
    assert "times as large as the largest of the main layers'" in item["cause"]


@pytest.mark.parametrize(
    ("source", "by", "words"),
    [
        (GLM, -1, "the w of a norm that multiplies by 1 + w"),
        (QWEN, 1, "is 1 too large: its median is"),
        (QWEN, -1, "is 1 too small: its median is"),
    ],
    ids=["w less one", "w of 1 + w and one", "w of 1 + w less one"],
)
def test_norms_of_one_main_layer_that_are_one_off_are_named(
    source: Path, by: int, words: str, tmp_path: Path
) -> None:
    layer = "model.layers.1."

    def shift(stored: Tensors) -> None:
        for name in stored:
            if name.startswith(layer) and name.endswith("norm.weight") and ".linear" not in name:
                stored[name] = stored[name] + by

    found = failures(rewritten(source, tmp_path / "damaged", shift))
    assert words in found[LAYERS]["cause"]
    named = [problem["subject"] for problem in found[LAYERS]["data"]["problems"]]
    assert named and all(name.startswith(layer) for name in named)


def test_one_main_norm_far_from_those_of_all_other_layers_is_named(tmp_path: Path) -> None:
    name = "model.layers.1.input_layernorm.weight"

    def multiply(stored: Tensors, name: str) -> None:
        stored[name] = stored[name] * 100

    found = failures(rewritten(GLM, tmp_path / "damaged", changed(multiply, name)))
    assert found[LAYERS]["subject"] == name


def test_a_norm_of_1_plus_w_of_which_a_part_was_filled_is_not_one_too_small(
    tmp_path: Path,
) -> None:
    name = "mtp.layers.0.self_attn.q_norm.weight"

    def fill(stored: Tensors, name: str) -> None:
        stored[name][: len(stored[name]) // 2] = -1

    found = failures(rewritten(QWEN, tmp_path / "damaged", changed(fill, name)))
    words = found["no weight is cut off or lost in part"]["cause"]
    assert "mtp: norms as the main model's" not in found
    assert words.startswith("elements 0 to ") and f"of {name} are -1, half of it" in words


def test_norms_of_1_plus_w_that_are_all_one_too_small_are_named(tmp_path: Path) -> None:
    """The main layers' and the module's, which then are as these."""

    def shift(stored: Tensors) -> None:
        for name in stored:
            if name.endswith("norm.weight") and ".linear" not in name:
                stored[name] = stored[name] - 1

    found = failures(rewritten(QWEN, tmp_path / "damaged", shift))
    assert "is 1 too small: its median is" in found[LAYERS]["cause"]


@pytest.mark.parametrize(
    ("source", "name", "factor"),
    [
        (GLM, f"{GLM_MTP}enorm.weight", 32),
        (GLM, f"{GLM_MTP}hnorm.weight", 1 / 32),
        (GLM, f"{GLM_MTP}shared_head.norm.weight", 1 / 100),
        (QWEN, "mtp.pre_fc_norm_hidden.weight", 32),
        (QWEN, "mtp.norm.weight", 32),
    ],
)
def test_a_norm_without_a_like_in_the_main_layers_is_compared_with_all(
    source: Path, name: str, factor: float, tmp_path: Path
) -> None:
    added = 0 if source == GLM else 1  # by engines

    def multiply(stored: Tensors, name: str) -> None:
        stored[name] = ((stored[name].float() + added) * factor - added).bfloat16()

    (item,) = failures(rewritten(source, tmp_path / "damaged", changed(multiply, name))).values()
    assert (item["name"], item["subject"]) == (SIZES, name)
    assert "of the main model's norms: it was multiplied" in item["cause"]


def test_norms_before_the_projection_are_told_together(tmp_path: Path) -> None:
    """As nothing moves scales into them."""
    names = [f"{GLM_MTP}{last}.weight" for last in ("enorm", "hnorm")]

    def multiply(stored: Tensors, name: str) -> None:
        stored[name] = stored[name] * 50

    (item,) = failures(rewritten(GLM, tmp_path / "damaged", changed(multiply, *names))).values()
    assert [problem["subject"] for problem in item["data"]["problems"]] == names
