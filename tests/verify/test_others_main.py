"""Main models of other tools' formats beside --source, tensor by tensor by their decoded values."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cases import nightly_but, run_program
from quantized_by_others import LINEAR, METHODS, Tensors, read_all, unquantized
from verify.foreign_sources import GLM, Checkpoint, released

INLINE = [name for name, how in METHODS.items() if how.file is None]
ITEM = "main: weights against the source"
LAYER = "model.layers.1."
Change = Callable[[Tensors], None]


def made(
    method: str, *, smoothed: bool, change: Change = lambda _: None, mtp: bool = False
) -> Checkpoint:
    """The miniature in a format, its main linears, or all, smoothed and changed before."""
    found, how = released(GLM), METHODS[method]
    tensors = dict(unquantized(read_all(GLM)))
    if smoothed:
        smooth(tensors, layers=4 if mtp else 3)
    change(tensors)
    found.tensors = {}
    for name, tensor in tensors.items():
        module, own = name.removesuffix(".weight"), found.tensors
        is_covered = LINEAR.match(name) and re.match(how.covers, name)
        if is_covered and (mtp or not name.startswith(found.layer)):
            parts, _ = how.encode(tensor.float())
            own |= {f"{module}.{last}": one.contiguous() for last, one in parts.items()}
        else:
            own[name] = tensor if tensor.dtype is torch.float32 else tensor.to(how.dtype)
    found.config |= {"quantization_config": copy.deepcopy(how.config)}
    found.config["torch_dtype"] = str(how.dtype).removeprefix("torch.")
    return found


def smooth(tensors: Tensors, layers: int) -> None:
    """Divide norms and rows of up by scales, and multiply the columns that take them, as AWQ and
    SmoothQuant do."""
    generator = torch.Generator().manual_seed(1)

    def move(divided: str, takers: list[str]) -> None:
        own = tensors[divided]
        scales = torch.exp(0.4 * torch.randn(len(own), generator=generator))
        tensors[divided] = (own.float() / scales.reshape(-1, *[1] * (own.dim() - 1))).bfloat16()
        for name in takers:
            tensors[name] = (tensors[name].float() * scales).bfloat16()

    for number in range(layers):
        layer = f"model.layers.{number}."
        own = [name for name in tensors if name.startswith(layer)]
        takers = [name for name in own if re.search(r"self_attn\.[qkv]_proj\.weight$", name)]
        move(f"{layer}input_layernorm.weight", takers)
        takers = [n for n in own if re.search(r"(gate_proj|up_proj|mlp\.gate)\.weight$", n)]
        move(f"{layer}post_attention_layernorm.weight", takers)
        for name in (name for name in own if name.endswith("up_proj.weight")):
            move(name, [name.replace("up_proj", "down_proj")])


def judged(checkpoint: Checkpoint, folder: Path) -> dict[str, Any]:
    """The items of check weights, by name."""
    checkpoint.save(folder)
    options = ("--level", "weights", "--source", GLM, "--json", "--quiet")
    checks = json.loads(run_program("verify", folder, *options).out)["checks"]
    (items,) = (check["items"] for check in checks if check["name"] == "weights")
    return {item["name"]: item for item in items}


@pytest.mark.parametrize("method", nightly_but(["awq", "modelopt nvfp4"], INLINE))
def test_every_format_is_compared_by_its_values(method: str, tmp_path: Path) -> None:
    item = judged(made(method, smoothed=False), tmp_path / "main")[ITEM]
    assert (item["status"], item["figure"]) == ("pass", "97 by values")


@pytest.mark.parametrize("method", ["awq", "compressed-tensors, int4"])
def test_scales_that_were_moved_are_no_difference(method: str, tmp_path: Path) -> None:
    item = judged(made(method, smoothed=True), tmp_path / "main")[ITEM]
    assert (item["status"], item["figure"]) == (
        "pass",
        "97 by values, 74 weights with scales of channels",
    )


def test_a_router_of_an_mtp_layer_that_was_not_smoothed(tmp_path: Path) -> None:
    name = "model.layers.3.mlp.gate.weight"

    def change(tensors: Tensors) -> None:
        tensors[name] = read_all(GLM)[name]

    items = judged(made("awq", smoothed=True, change=change, mtp=True), tmp_path / "whole")
    failed = [item["cause"] for item in items.values() if item["status"] == "fail"]
    assert len(failed) == 1 and f"{name} is as the source has it" in failed[0], failed


@pytest.mark.parametrize("damaged", [False, True])
def test_the_main_model_of_a_graft_is_compared_too(damaged: bool, tmp_path: Path) -> None:
    change, smoothed, words = DAMAGES["experts"]
    change = change if damaged else lambda tensors: None
    made("awq", smoothed=smoothed, change=change).save(tmp_path / "main")
    bundle = tmp_path / "bundle"
    graft = ("graft", "--main", tmp_path / "main", "--mtp", GLM, "--output-dir", bundle)
    assert run_program(*graft, "--replace", "--quiet").code == 0
    options = ("--level", "weights", "--source", GLM, "--json", "--quiet")
    checks = json.loads(run_program("verify", bundle, *options).out)["checks"]
    (item,) = (i for check in checks for i in check["items"] if i["name"] == ITEM)
    assert item["status"] == ("fail" if damaged else "pass")
    assert (words in item["cause"]) is damaged


@pytest.mark.parametrize("damaged", [False, True])
def test_an_mtp_layer_may_be_smoothed_too(damaged: bool, tmp_path: Path) -> None:
    name = f"model.layers.3.{DOWN}.weight"

    def change(tensors: Tensors) -> None:
        tensors[name] = tensors[name].flip(0) if damaged else tensors[name]

    checkpoint = made("awq", smoothed=True, change=change, mtp=True)
    items = judged(checkpoint, tmp_path / "whole")
    failed = [item["cause"] for item in items.values() if item["status"] == "fail"]
    assert len(failed) == damaged, failed
    assert all("3.mlp.shared_experts.down_proj" in cause for cause in failed)
    moved = items["mtp: scales of channels that others undo"]["figure"]
    assert moved == f"{31 if damaged else 33} weights"  # without down, none makes up for up


def exchanged(one: str, other: str) -> Change:
    def change(tensors: Tensors) -> None:
        names = [f"model.layers.{name}.weight" for name in (one, other)]
        tensors[names[0]], tensors[names[1]] = (tensors[name] for name in reversed(names))

    return change


def times(name: str, factor: float | torch.Tensor) -> Change:
    def change(tensors: Tensors) -> None:
        tensors[f"{LAYER}{name}.weight"] = (tensors[f"{LAYER}{name}.weight"] * factor).bfloat16()

    return change


RAMP = torch.linspace(0.5, 2, 128)
DOWN = "mlp.shared_experts.down_proj"
ROUTER = "model.layers.1.mlp.gate.weight"


def router_left(tensors: Tensors) -> None:
    """Its columns as they were before the norm was divided."""
    tensors[ROUTER] = read_all(GLM)[ROUTER]


DAMAGES: dict[str, tuple[Change, bool, str]] = {
    "experts": (
        exchanged("1.mlp.experts.0.up_proj", "1.mlp.experts.1.up_proj"),
        False,
        "it holds model.layers.1.mlp.experts.1.up_proj",
    ),
    "keys, smoothed": (
        exchanged("1.self_attn.k_proj", "2.self_attn.k_proj"),
        True,
        "it holds the codes of model.layers.2.self_attn.k_proj",
    ),
    "norm alone": (times("input_layernorm", RAMP), False, "input_layernorm.weight is not the"),
    "norm, smoothed": (times("input_layernorm", RAMP), True, "input_layernorm.weight is not the"),
    "columns alone": (times("self_attn.q_proj", RAMP), False, "q_proj.qweight is not the source's"),
    "router left": (router_left, True, "1.mlp.gate.weight is as the source has it, and the norm"),
    "one matrix": (times(DOWN, 2.0), False, "every scale is 2"),
}


@pytest.mark.parametrize("name", nightly_but(["keys, smoothed", "router left"], [*DAMAGES]))
def test_what_no_other_weight_makes_up_for_is_told(name: str, tmp_path: Path) -> None:
    change, smoothed, words = DAMAGES[name]
    item = judged(made("awq", smoothed=smoothed, change=change), tmp_path / "main")[ITEM]
    assert item["status"] == "fail"
    assert words in item["cause"]


def test_a_rotated_stream_is_not_compared(tmp_path: Path) -> None:
    def rotate(tensors: Tensors) -> None:
        rotation = torch.linalg.qr(torch.randn(128, 128, generator=torch.Generator()))[0]
        for name, own in tensors.items():
            if own.dim() == 2 and own.shape[1] == 128:
                tensors[name] = (own.float() @ rotation).bfloat16()

    item = judged(made("awq", smoothed=False, change=rotate), tmp_path / "main")[ITEM]
    assert (item["status"], "rotated the stream" in item["cause"]) == ("not tested", True)
