"""Norms of a module that are 1 too small or too large, in models whose engines add 1 to them and in
others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cases import nightly_but
from runtime.checkpoints import SMALL_CONFIGS, write_checkpoint
from verify.foreign import FIXTURES, GLM, GLM_MTP, Tensors, rewritten
from verify.test_mtp_values import failures

QWEN = FIXTURES / "qwen3-5-tiny"
ITEM = "mtp: norms as the main model's"
INPUTS = ("mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight")
LAYER = "mtp.layers.0."
OFFSET = ("qwen4_exp", "qwen3_next", "gigachat3_5", "step3p5")


def moved(by: float, *names: str) -> Callable[[Tensors], None]:
    """A change that adds a number to norms of these names."""

    def change(stored: Tensors) -> None:
        for name in names:
            stored[name] = (stored[name].float() + by).to(stored[name].dtype)

    return change


def named(folder: Path) -> list[str]:
    """The norms that the one failed item is about."""
    (item,) = failures(folder).values()
    assert item["name"] == ITEM
    return sorted(problem["subject"] for problem in item["data"]["problems"])


@pytest.mark.parametrize("by", [-1, 1])
@pytest.mark.parametrize("family", nightly_but(OFFSET[:1], OFFSET))
def test_norms_that_are_all_one_off_are_all_named(family: str, by: int, tmp_path: Path) -> None:
    small = write_checkpoint(tmp_path / "small", SMALL_CONFIGS[family])
    assert not failures(small)
    names = []

    def move(stored: Tensors) -> None:
        layer = "mtp." if "mtp.layers.0.mlp.gate.weight" in stored else "model.layers."
        first = SMALL_CONFIGS[family].get("num_hidden_layers", 0)
        names.extend(
            name
            for name in stored
            if name.startswith(layer)
            and "norm" in name
            and name.endswith(".weight")
            and (layer == "mtp." or int(name.split(".")[2]) >= first)
            and stored[name].dim() == 1
        )
        moved(by, *names)(stored)

    folder = rewritten(small, tmp_path / "moved", move)
    assert named(folder) == sorted(names) and len(names) > 6


@pytest.mark.parametrize(("by", "names"), [(1, INPUTS), (1, INPUTS[:1]), (-1, INPUTS[1:])])
def test_norms_before_the_projection_alone_are_named(
    by: int, names: tuple[str, ...], tmp_path: Path
) -> None:
    """No main layer has the like of them."""
    small = write_checkpoint(tmp_path / "small", SMALL_CONFIGS["qwen4_exp"])
    assert named(rewritten(small, tmp_path / "moved", moved(by, *names))) == [*names]


@pytest.mark.parametrize("by", [-1, 1])
@pytest.mark.parametrize("norm", ["input_layernorm", "post_attention_layernorm"])
def test_a_norm_of_the_trained_layer_alone_is_named(norm: str, by: int, tmp_path: Path) -> None:
    """Of a miniature in which few of a norm's weights are then negative."""
    name = f"{LAYER}{norm}.weight"
    assert named(rewritten(QWEN, tmp_path / "moved", moved(by, name))) == [name]


@pytest.mark.parametrize(("by", "norm"), [(-1, "k_norm"), (1, "q_norm"), (1, "k_norm")])
def test_of_norms_of_queries_and_keys_the_one_that_is_off_is_named(
    by: int, norm: str, tmp_path: Path
) -> None:
    name = f"{LAYER}self_attn.{norm}.weight"
    (item,) = failures(rewritten(QWEN, tmp_path / "moved", moved(by, name))).values()
    problems = item["data"]["problems"]
    assert len(problems) == 1 and name in problems[0]["words"]
    assert ("1 too large" if by > 0 else "lacks the 1") in problems[0]["words"]


def test_norms_around_other_numbers_than_the_main_layers_may_be_good(tmp_path: Path) -> None:
    """Those of queries and keys around zero, beside main ones that were trained to be larger, and
    norms that grew in the module alone, no element of which is negative."""
    generator = torch.Generator().manual_seed(4)

    def change(stored: Tensors) -> None:
        for name in ("q_norm", "k_norm"):
            stored[f"{LAYER}self_attn.{name}.weight"] -= 0.36
        for name in (*INPUTS, "mtp.norm.weight"):
            grown = 0.6 + 0.9 * torch.rand(128, generator=generator)
            stored[name] = grown.bfloat16()

    assert not failures(rewritten(QWEN, tmp_path / "good", change))


@pytest.mark.parametrize("alone", [False, True])
def test_norms_that_had_one_added_are_named_where_none_is_added(
    alone: bool, tmp_path: Path
) -> None:
    """Where all that main layers have the like of had: one alone may have been trained so."""

    def move(stored: Tensors) -> None:
        names = [n for n in stored if n.startswith(GLM_MTP) and "norm.weight" in n]
        assert len(names) == 7
        moved(1, *([f"{GLM_MTP}input_layernorm.weight"] if alone else names))(stored)

    folder = rewritten(GLM, tmp_path / "moved", move)
    if alone:
        assert not failures(folder)
        return
    (item,) = failures(folder).values()
    assert item["name"] == ITEM and "is 1 too large: its median is" in item["cause"]
    assert "multiply by it as it is" in item["cause"]
    assert len(item["data"]["problems"]) >= 5


def test_the_last_norm_of_a_module_is_named_where_few_of_it_is_negative(tmp_path: Path) -> None:
    """Less 1, as of 1 + w: 9 %."""
    name = f"{GLM_MTP}shared_head.norm.weight"
    (item,) = failures(rewritten(GLM, tmp_path / "moved", moved(-1, name))).values()
    assert (item["name"], item["subject"]) == ("mtp: norms multiply by w", name)


def test_norms_that_grow_with_the_layers_are_not_one_off(tmp_path: Path) -> None:
    """Those of modules behind 3 layers are as far above the last as that is above the first."""
    small = write_checkpoint(tmp_path / "small", SMALL_CONFIGS["step3p5"])

    def grow(stored: Tensors) -> None:
        for name, tensor in stored.items():
            if "norm" in name and name.startswith("model.layers."):
                by = 1 + int(name.split(".")[2]) / 2
                stored[name] = ((tensor.float() + 1) * by - 1).to(tensor.dtype)

    assert failures(rewritten(small, tmp_path / "grown", grow)) == {}


def test_a_norm_that_was_multiplied_is_not_one_off(tmp_path: Path) -> None:
    """Though its median is below zero, and some of it is negative."""

    def multiply(stored: Tensors) -> None:
        stored[INPUTS[1]] = stored[INPUTS[1]] * 448

    (item,) = failures(rewritten(QWEN, tmp_path / "large", multiply)).values()
    assert item["name"] == "mtp: norms as large as the main layers'"
    assert item["subject"] == INPUTS[1]
