"""A main layer in the place of the MTP module, its linears stored in another format."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cases import run_program
from faults.small_model import family_config, write_dense
from quantized_by_others import LINEAR, read_all, unquantized
from verify.foreign import GLM as GLM_FOLDER
from verify.foreign import GLM_MTP, Tensors, rewritten
from verify.foreign_damages import BLOCK
from verify.foreign_folders import listed
from verify.foreign_folders import unquantized as left_out
from verify.foreign_sources import GLM, Checkpoint, quantized
from verify.test_mtp_values import failures

ITEM = "mtp: no main layer in its place"
AWQ = left_out("awq", "model.layers.3.", "model.decoder.")


def original_layer(checkpoint: Checkpoint, pattern: str = "") -> None:
    """The block of main layer 2 before it was quantized, but for names that a pattern excludes."""
    original = unquantized(read_all(checkpoint.source))
    for name, tensor in checkpoint.mtp().items():
        last = name.removeprefix(checkpoint.layer)
        if BLOCK.match(last) and not (pattern and pattern in last):
            checkpoint.set(last, original[f"model.layers.2.{last}"].to(tensor.dtype))


def own_linears(checkpoint: Checkpoint) -> None:
    """All that is not quantized is main layer 2's, but for the router, which goes with experts, and
    the linears are the module's own."""
    mtp = checkpoint.mtp()
    own = {name: one for name, one in mtp.items() if LINEAR.match(name) or ".mlp.gate." in name}
    original_layer(checkpoint)
    checkpoint.tensors |= own


def trained_on(checkpoint: Checkpoint) -> None:
    """The module began as main layer 2: its linears have hardly moved since, its router has."""
    original_layer(checkpoint)
    router = checkpoint.of("mlp.gate.weight")
    router[0, 0] *= 1.25


def judged(checkpoint: Checkpoint, folder: Path) -> tuple[int, dict[str, Any]]:
    """The exit code, and the item."""
    checkpoint.save(folder)
    outcome = run_program("verify", folder, "--level", "weights", "--json", "--quiet")
    (ledger,) = (c for c in json.loads(outcome.out)["checks"] if c["name"] == "ledger")
    return outcome.code, {item["name"]: item for item in ledger["items"]}[ITEM]


@pytest.mark.parametrize("start", [AWQ, listed("fp8")], ids=["AWQ", "fp8"])
def test_a_main_layer_is_named(start: Callable[[], Checkpoint], tmp_path: Path) -> None:
    checkpoint = start()
    original_layer(checkpoint)
    code, item = judged(checkpoint, tmp_path / "taken")
    assert (code, item["status"]) == (7, "fail")
    assert item["subject"].startswith("model.layers.3.")
    assert "model.layers.3 is the main layer model.layers.2 in another format" in item["cause"]
    assert "graft" in item["repair"] and "model.layers.1" not in item["cause"]


def test_a_main_layer_is_named_once(tmp_path: Path) -> None:
    """And its router, whose bytes are equal, not by itself."""
    checkpoint = AWQ()
    for name, tensor in {**checkpoint.tensors}.items():
        if name.startswith("model.layers.2.mlp.gate."):
            checkpoint.tensors[name] = tensor.bfloat16()
    original_layer(checkpoint)
    for last in ("mlp.gate.weight", "mlp.gate.e_score_correction_bias"):
        checkpoint.set(last, checkpoint.tensors[f"model.layers.2.{last}"])
    checkpoint.save(tmp_path / "taken")
    outcome = run_program("verify", tmp_path / "taken", "--level", "weights", "--quiet")
    assert outcome.code == 7 and "Found 1 cause" in outcome.err.replace("in 2 of", "")


def test_norms_in_another_dtype_are_compared_too(tmp_path: Path) -> None:
    """Awq's norms are fp16: a layer from the bf16 original has them in bf16."""
    checkpoint = AWQ()
    original_layer(checkpoint)
    for name, tensor in checkpoint.mtp().items():
        if tensor.dtype is torch.float16:
            checkpoint.tensors[name] = tensor.bfloat16()
    assert judged(checkpoint, tmp_path / "taken")[1]["status"] == "fail"


@pytest.mark.parametrize(("change", "code"), [(own_linears, 7), (trained_on, 0)])
def test_a_module_that_shares_a_part_is_no_main_layer(
    change: Callable[[Checkpoint], None], code: int, tmp_path: Path
) -> None:
    """Norms and biases that were taken are told by themselves, beside linears that are unlike."""
    checkpoint = AWQ()
    change(checkpoint)
    found, item = judged(checkpoint, tmp_path / "shared")
    assert (found, item["status"]) == (code, "pass")
    assert item["figure"] == "3 main layers in other codes"


def original_attention(checkpoint: Checkpoint) -> None:
    """The attention of main layer 2 before it was quantized, and norms and MLP of the module."""
    own = {name: one for name, one in checkpoint.mtp().items() if ".self_attn." not in name}
    original_layer(checkpoint)
    checkpoint.tensors |= own


def test_a_part_of_a_main_layer_is_named(tmp_path: Path) -> None:
    checkpoint = AWQ()
    original_attention(checkpoint)
    code, item = judged(checkpoint, tmp_path / "taken")
    assert (code, item["subject"]) == (7, "model.layers.3.self_attn.q_proj.weight")
    assert "model.layers.3.self_attn is the main layer model.layers.2.self_attn" in item["cause"]


@pytest.mark.parametrize("layer", [0, 1])
def test_the_attention_of_a_layer_of_another_kind_is_named(layer: int, tmp_path: Path) -> None:
    """Layer 0 has an MLP without experts, so that nothing else can be unlike."""
    checkpoint, original = AWQ(), unquantized(read_all(GLM))
    for name, tensor in checkpoint.mtp().items():
        last = name.removeprefix(checkpoint.layer)
        if last.startswith("self_attn."):
            checkpoint.set(last, original[f"model.layers.{layer}.{last}"].to(tensor.dtype))
    code, item = judged(checkpoint, tmp_path / "taken")
    words = f"model.layers.3.self_attn is the main layer model.layers.{layer}.self_attn"
    assert code == 7 and words in item["cause"]


def linears_of_attention(checkpoint: Checkpoint) -> None:
    """Those of main layer 2 before it was quantized, beside norms and biases of the module."""
    own = {
        name: one
        for name, one in checkpoint.mtp().items()
        if ".self_attn." not in name or not LINEAR.match(name)
    }
    original_layer(checkpoint)
    checkpoint.tensors |= own


def test_linears_of_the_attention_of_a_main_layer_are_named(tmp_path: Path) -> None:
    checkpoint = AWQ()
    linears_of_attention(checkpoint)
    code, item = judged(checkpoint, tmp_path / "taken")
    assert (code, item["subject"]) == (7, "model.layers.3.self_attn.q_proj.weight")
    words = (
        "the linears of model.layers.3.self_attn are those of the main layer model.layers.2.self"
    )
    assert words in item["cause"]


@pytest.mark.parametrize("parts", [(".experts.",), ("experts.",), (".self_attn.", ".experts.")])
def test_experts_of_a_main_layer_are_named(parts: tuple[str, ...], tmp_path: Path) -> None:
    """Beside the module's own router: alone, with shared experts, or with attention."""
    checkpoint = AWQ()
    own = {name: one for name, one in checkpoint.mtp().items() if not any(p in name for p in parts)}
    original_layer(checkpoint)
    checkpoint.tensors |= own
    code, item = judged(checkpoint, tmp_path / "taken")
    assert code == 7
    assert "model.layers.3.mlp.experts" in item["cause"]
    assert "is the main layer model.layers.2." in item["cause"]


def anew(checkpoint: Checkpoint, layer: str, part: str = "") -> None:
    """Main layer 2, or what begins so of it, in another layer's place, quantized anew under
    scales that are half as large again."""
    for name, tensor in {**checkpoint.tensors}.items():
        if not name.startswith(f"model.layers.2.{part}"):
            continue
        own = f"{layer}{name.removeprefix('model.layers.2.')}"
        if own.endswith("_scale_inv"):
            checkpoint.tensors[own] = tensor * 1.5
        elif f"{name}_scale_inv" in checkpoint.tensors:
            checkpoint.tensors[own] = (tensor.float() / 1.5).to(tensor.dtype)
        else:
            checkpoint.tensors[own] = tensor


def test_a_main_layer_in_other_codes_of_its_format_is_named(tmp_path: Path) -> None:
    checkpoint = quantized(GLM, "fp8", "quantized")
    anew(checkpoint, "model.layers.3.")
    code, item = judged(checkpoint, tmp_path / "taken")
    assert code == 7
    assert "model.layers.3 is the main layer model.layers.2 in another format" in item["cause"]


def test_beside_an_exact_copy_no_near_one_is_named(tmp_path: Path) -> None:
    checkpoint, experts = quantized(GLM, "fp8", "quantized"), "mlp.experts."
    anew(checkpoint, "model.layers.1.", experts)
    for name, tensor in {**checkpoint.tensors}.items():
        if name.startswith(f"model.layers.2.{experts}"):
            checkpoint.tensors[name.replace("layers.2", "layers.3")] = tensor
    checkpoint.save(tmp_path / "taken")
    outcome = run_program("verify", tmp_path / "taken", "--level", "weights", "--quiet")
    assert outcome.code == 7
    assert "model.layers.3.mlp.experts holds the same as model.layers.2.mlp.experts" in outcome.err
    assert "layers.1" not in outcome.err


@pytest.mark.parametrize("taken", [True, False])
def test_the_mixer_of_a_layer_that_has_no_other_part_is_named(taken: bool, tmp_path: Path) -> None:
    """Nothing else of the layer tells it, but its linears are all that main layer's."""
    small = write_dense(tmp_path / "nemotron", config=family_config("nemotron_h"))

    def change(stored: Tensors) -> None:
        for one in "qkvo":
            name = f"backbone.layers.3.mixer.{one}_proj.weight"
            weight = stored[name].float()
            scale = weight.abs().amax(1, keepdim=True) / 448
            stored[name] = (weight / scale).to(torch.float8_e4m3fn)
            stored[f"{name}_scale"] = scale
            if taken:
                stored[f"mtp.layers.0.mixer.{one}_proj.weight"] = weight.bfloat16()

    group = {
        "targets": [r"re:backbone\.layers\.3\.mixer\..*"],
        "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
        "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
    }
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": [],
    }
    folder = rewritten(
        small,
        tmp_path / "taken",
        change,
        lambda config: config.update(quantization_config=quantization),
    )
    outcome = run_program("verify", folder, "--level", "weights", "--json", "--quiet")
    (ledger,) = (c for c in json.loads(outcome.out)["checks"] if c["name"] == "ledger")
    item = {item["name"]: item for item in ledger["items"]}[ITEM]
    assert item["status"] == ("fail" if taken else "pass")
    assert ("mtp.layers.0.mixer is the main layer backbone.layers.3.m" in item["cause"]) == taken


@pytest.mark.parametrize("share", [0.01, 0.1])
def test_a_module_that_hardly_moved_from_a_main_layer_is_named(
    share: float, tmp_path: Path
) -> None:
    """One that moved by a tenth was trained."""

    def begun(stored: Tensors) -> None:
        noise = torch.Generator().manual_seed(3)
        for name in [*stored]:
            if name.startswith(GLM_MTP) and BLOCK.match(name.removeprefix(GLM_MTP)):
                own = stored[name.replace(GLM_MTP, "model.layers.2.")].float()
                moved = share * own.square().mean().sqrt() * torch.randn(own.shape, generator=noise)
                stored[name] = (own + moved).to(stored[name].dtype)

    found = failures(rewritten(GLM_FOLDER, tmp_path / "begun", begun))
    assert [*found] == ([ITEM] if share < 0.02 else [])
    if found:
        assert "begun from that layer and hardly trained" in found[ITEM]["cause"]
