"""Modules of which a part is lost, beside what is there under another name, each told once."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cases import run_program
from faults.small_model import family_config, write_dense
from gguf_files import gguf_model
from mtp_checkpoints.families.other_names import other_names
from verify.foreign import GLM, GLM_MTP, Tensors, rewritten
from verify.foreign_sources import ignore, quantized

EXPERTS = f"{GLM_MTP}mlp.experts."


def causes(folder: Path) -> list[str]:
    outcome = run_program("verify", folder, "--level", "files", "--json", "--quiet")
    assert outcome.code == 7
    return [cause["text"] for cause in json.loads(outcome.out)["causes"]]


def but(lost: str, own: str, other: str) -> Callable[[Tensors], Tensors]:
    """A change that leaves a tensor out, and renames what begins so."""
    return lambda stored: {
        name.replace(own, other): one for name, one in stored.items() if name != lost
    }


@pytest.mark.parametrize("lost", ["hnorm", "self_attn.o_proj", "mlp.experts.4.up_proj"])
@pytest.mark.parametrize("one", ["self_attn.k_norm", "mlp.experts.2.up_proj", "enorm"])
def test_one_under_another_name_is_told_beside_one_that_is_lost(
    lost: str, one: str, tmp_path: Path
) -> None:
    lost, own = f"{GLM_MTP}{lost}.weight", f"{GLM_MTP}{one}."
    other = f"{own[:-1]}_v2."
    text, *_ = causes(rewritten(GLM, tmp_path / "both", but(lost, own, other)))
    assert "tensors of the module are there under other names (1): " in text.partition(";")[0]
    assert f"{other}weight lies where engines look for {own}weight" in text
    assert f"Under no name: {lost}" in text and f"{EXPERTS}2 lacks" not in text
    assert "lacks up_proj_v2" not in text


def test_names_that_are_like_others_alone_tell_nothing_of_a_lost_module() -> None:
    class Tensor:
        def __init__(self) -> None:
            self.dtype, self.shape, self.optional = "BF16", (8, 8), False

    wanted: Any = {f"model.layers.3.{one}_proj.weight": Tensor() for one in "qkv"}
    there: Any = {"midlayer.q_proj.weight": Tensor()}
    assert other_names(wanted, there) is None
    there = {"model.layers.3.gate_proj.weight": Tensor()}
    assert other_names(wanted, there) is None


@pytest.mark.parametrize("tensor", ["weight", "weight_scale"])
@pytest.mark.parametrize("module", [f"{EXPERTS}5.gate_proj", f"{GLM_MTP}self_attn.k_proj"])
def test_a_lost_tensor_of_a_weight_is_told_once(module: str, tensor: str, tmp_path: Path) -> None:
    checkpoint = ignore(quantized(GLM, "compressed-tensors, fp8", "quantized"), "re:.*eh_proj")
    del checkpoint.tensors[f"{module}.{tensor}"]
    checkpoint.save(tmp_path / "lost")
    (text,) = causes(tmp_path / "lost")
    assert re.search("missing|lacks|no scale is beside it", text)


@pytest.mark.parametrize("half", ["k", "v"])
@pytest.mark.parametrize("layer", [1, 3])
def test_a_lost_half_of_a_gguf_files_projection_is_named(
    layer: int, half: str, tmp_path: Path
) -> None:
    """Of the module as of a main layer, and of the other half nothing else is said."""
    dense = write_dense(tmp_path / "dense", config=family_config("deepseek_v3"))
    other_half = "v" if half == "k" else "k"
    lost, other = (f"blk.{layer}.attn_{one}_b.weight" for one in (half, other_half))
    model = gguf_model(dense).only(lambda name: name != lost)
    (text,) = causes(model.write(tmp_path / "model.gguf"))
    whole = f"model.layers.{layer}.self_attn.kv_b_proj.weight"
    assert text == f"{lost} is missing: of {whole} there is {other} alone, its other half"
