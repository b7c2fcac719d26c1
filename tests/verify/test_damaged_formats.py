"""Damage to an MTP layer in every form that it is stored in: each is found in its own tensor,
without a source, in two families."""

from __future__ import annotations

import copy
import functools
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from cases import nightly_but
from decoded_mains import BITSANDBYTES_NF4, QUARK_INT4, affine, int4, int8, nf4
from faults.matrix import no_progress
from mtp_export.verify import CHECKS, check_result
from mtp_export.verify.check import Item, Level, Status
from mtp_export.verify.context import Context
from mtp_export.verify.options import VerifyOptions
from quantized_by_others import LINEAR, METHODS, Tensors, unquantized
from verify.foreign_damages import NORM, embedding_half_zero
from verify.foreign_sources import (
    DEEPSEEK,
    GLM,
    Checkpoint,
    quantized,
    released,
    shortened,
)

# Forms that no writer of METHODS has, each with what is stored of a matrix, and its config.
OTHERS: dict[str, tuple[Callable[[torch.Tensor], Tensors], dict[str, Any]]] = {
    "MLX, 4 bits": (partial(affine, bits=4, group=32), {"group_size": 32, "bits": 4}),
    "MLX, 6 bits": (partial(affine, bits=6, group=64), {"group_size": 64, "bits": 6}),
    "Quark, int4": (partial(int4, group=32), QUARK_INT4),
    "bitsandbytes, nf4": (nf4, BITSANDBYTES_NF4),
    "bitsandbytes, int8": (int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
}
# By the name of each: its own of METHODS, None for unquantized and for OTHERS.
FORMS: dict[str, str | None] = {
    "bf16": None,
    **{
        name: name
        for name in (
            *("fp8", "compressed-tensors, int4", "compressed-tensors, int8"),
            *("compressed-tensors, fp8", "compressed-tensors, zero points", "auto-round"),
            *("auto-round, awq", "gptq", "gptq v2", "gptq, 8 bits", "awq"),
            *("modelopt fp8, in a file", "modelopt nvfp4"),
        )
    },
    **dict.fromkeys(OTHERS),
}
SCALES = (
    *("weight_scale_2", "weight_scale", "weight_scale_inv", "scales", "weight.absmax", "SCB"),
    "weight",
)
CODES = ("weight_packed", "qweight", "weight")
UNSOUND, SIZE, TWICE = "mtp: finite values", "sane size of every matrix", "no matrix of a layer"
ZERO, ONE_CODE = "mtp: no block rounded to zero", "mtp: no block of one code"


@functools.cache
def _sound(source: Path, form: str) -> Checkpoint:
    """A miniature, DeepSeek-V3's with five main layers, in one form."""
    start = released(source) if source == GLM else shortened(source, 5)
    start.tensors = unquantized(start.tensors)
    start.config.pop("quantization_config", None)
    if form in OTHERS:
        encode, start.config["quantization_config"] = OTHERS[form]
        for name in [name for name in start.tensors if LINEAR.match(name)]:
            module = name.removesuffix("weight")
            parts = encode(start.tensors.pop(name).float())
            start.tensors |= {f"{module}{last}": part for last, part in parts.items()}
        return start
    if (method := FORMS[form]) is None:
        return start
    with tempfile.TemporaryDirectory() as place:
        start.save(Path(place) / "source")
        return quantized(Path(place) / "source", method, "quantized")


def sound(source: Path, form: str) -> Checkpoint:
    found = _sound(source, form)
    changed = copy.copy(found)
    changed.source, changed.tensors = source, dict(found.tensors)
    changed.config = copy.deepcopy(found.config)
    return changed


def tensors_of(checkpoint: Checkpoint, module: str) -> Tensors:
    """Copies of the tensors of a module of the MTP layer, by the last component of their names."""
    start = f"{checkpoint.layer}{module}."
    return {
        name.removeprefix(start): tensor.clone(memory_format=torch.contiguous_format)
        for name, tensor in checkpoint.tensors.items()
        if name.startswith(start)
    }


def change(
    checkpoint: Checkpoint,
    module: str,
    names: tuple[str, ...],
    value: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Change the first of some tensors that a module has, in its flat form."""
    found = tensors_of(checkpoint, module)
    name = next(one for one in names if one in found)
    flat = value(found[name].flatten()).to(found[name].dtype)
    checkpoint.set(f"{module}.{name}", flat.view_as(found[name]))


def first(number: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda flat: torch.cat([flat[:1].float() * number, flat[1:].float()])


def without_its_end(flat: torch.Tensor) -> torch.Tensor:
    return torch.cat([flat[: len(flat) // 2], torch.zeros_like(flat[len(flat) // 2 :])])


def rows_rounded_to_zero(checkpoint: Checkpoint, module: str, form: str) -> None:
    """The first rows but for one column, which their scales are of."""
    values = unquantized(_sound(checkpoint.source, "bf16").tensors)
    weight = values[f"{checkpoint.layer}{module}.weight"].float()
    weight[:32, 1:] = 0
    method = FORMS[form]
    parts = {"weight": weight.bfloat16()} if method is None else METHODS[method].encode(weight)[0]
    parts = OTHERS[form][0](weight) if form in OTHERS else parts
    for last, tensor in parts.items():
        checkpoint.set(f"{module}.{last}", tensor)


def norms_less_one(checkpoint: Checkpoint) -> None:
    for name, tensor in checkpoint.mtp().items():
        if NORM.search(name):
            checkpoint.tensors[name] = tensor - 1


def damage(checkpoint: Checkpoint, form: str) -> dict[str, tuple[str, ...]]:
    """Damage each module in a way of its own; return the items that may tell, by module."""
    expert = "mlp.experts.{}.{}_proj".format
    change(checkpoint, expert(0, "gate"), SCALES, first(float("nan")))
    change(checkpoint, expert(0, "up"), SCALES, first(float("inf")))
    change(checkpoint, expert(1, "up"), SCALES, lambda flat: flat.float() * 1000)
    for last, tensor in tensors_of(checkpoint, expert(2, "up")).items():
        checkpoint.set(f"{expert(3, 'up')}.{last}", tensor)
    change(checkpoint, expert(4, "down"), CODES, torch.zeros_like)
    change(checkpoint, "self_attn.o_proj", CODES, without_its_end)
    rows_rounded_to_zero(checkpoint, expert(5, "up"), form)
    norms_less_one(checkpoint)
    embedding_half_zero(checkpoint)
    told: dict[str, tuple[str, ...]] = {
        expert(0, "gate"): (UNSOUND,),
        expert(0, "up"): (UNSOUND,),
        expert(1, "up"): (SIZE,),
        expert(3, "up"): (TWICE,),
        expert(4, "down"): ("mtp: no constant tensor", ONE_CODE),
        "self_attn.o_proj": (ZERO, ONE_CODE),
        expert(5, "up"): (ZERO,),
        "input_layernorm": ("mtp: norms multiply by w",),
        "eh_proj": ("mtp: halves of eh_proj",),
    }
    if form != "bf16":  # where a number is no scale of others
        change(checkpoint, expert(6, "up"), SCALES, first(1000))
        told[expert(6, "up")] = ("mtp: scales of one size", SIZE)
    return told


def failed_items(checkpoint: Checkpoint, folder: Path) -> list[Item]:
    checkpoint.save(folder)
    context = Context.open(VerifyOptions(folder, level=Level.WEIGHTS), no_progress)
    items = check_result("ledger", CHECKS["ledger"], context).items
    return [item for item in items if item.status is Status.FAIL]


def subjects_of(item: Item) -> list[str]:
    problems: Any = item.data.get("problems") or [{"subject": item.subject}]
    return [problem["subject"] for problem in problems]


# Every form in one family, and one of each kind in the other.
EVERY_PUSH = [
    *product([GLM], FORMS),
    *product([DEEPSEEK], ("bf16", "fp8", "compressed-tensors, int4", "awq")),
]


@pytest.mark.parametrize(
    ("source", "form"),
    nightly_but(EVERY_PUSH, product([GLM, DEEPSEEK], FORMS)),
    ids=lambda value: getattr(value, "name", value),
)
def test_each_damage_is_found_in_its_tensor(tmp_path: Path, source: Path, form: str) -> None:
    assert failed_items(sound(source, form), tmp_path / "sound") == []
    damaged = sound(source, form)
    told = damage(damaged, form)
    found = [
        (item.name, subject)
        for item in failed_items(damaged, tmp_path / "damaged")
        for subject in subjects_of(item)
    ]
    missed = [
        module
        for module, names in told.items()
        if not any(
            name.startswith(names) and subject.startswith(f"{damaged.layer}{module}.")
            for name, subject in found
        )
    ]
    assert missed == [], found


@pytest.mark.parametrize("form", nightly_but([*FORMS][::3], FORMS))
def test_a_main_layer_in_its_place_is_found(tmp_path: Path, form: str) -> None:
    """All that a linear is stored as is the main one's, its scales too."""
    taken = sound(GLM, form)
    for name, tensor in list(taken.tensors.items()):
        if name.startswith("model.layers.2."):
            taken.tensors[name.replace("model.layers.2.", taken.layer)] = tensor
    (item,) = failed_items(taken, tmp_path / "taken")
    assert item.name.startswith(TWICE)
    assert all("model.layers.2 (" in problem["words"] for problem in item.data["problems"])


def words_of(item: Item, subject: str) -> str:
    problems: Any = item.data["problems"]
    return next(one["words"] for one in problems if one["subject"] == subject)


def test_the_rows_of_a_scale_that_is_not_finite_are_told_once(tmp_path: Path) -> None:
    """And not by the runtime, too, that it cannot load them."""
    damaged = sound(GLM, "compressed-tensors, int8")
    scale = damaged.of("self_attn.o_proj.weight_scale").clone()
    scale[3] = torch.nan
    damaged.set("self_attn.o_proj.weight_scale", scale)
    (item,) = failed_items(damaged, tmp_path / "damaged")
    name = f"{damaged.layer}self_attn.o_proj.weight"
    assert words_of(item, name) == f"{name}: row 3: channel scale: expected finite numbers"


def test_a_single_scale_is_named_as_such(tmp_path: Path) -> None:
    damaged = sound(GLM, "MLX, 4 bits")
    change(damaged, "self_attn.o_proj", ("scales",), first(6e4))
    items = failed_items(damaged, tmp_path / "damaged")
    words = {words_of(item, f"{damaged.layer}self_attn.o_proj.weight") for item in items[:2]}
    assert len(items) > 1 and len(words) == 1
    assert "times as large as three quarters of its others" in words.pop()


def test_codes_that_are_all_alike_leave_the_router_alone(tmp_path: Path) -> None:
    damaged = sound(GLM, "gptq")
    change(damaged, "mlp.experts.0.gate_proj", CODES, torch.zeros_like)
    found = failed_items(damaged, tmp_path / "damaged")
    name = f"{damaged.layer}mlp.experts.0.gate_proj.qweight"
    assert words_of(found[0], name).startswith(f"all values of {name} are alike")
    assert {subject for item in found for subject in subjects_of(item)} == {name}


def test_the_rows_of_codes_that_are_alike_are_told(tmp_path: Path) -> None:
    damaged = sound(GLM, "awq")
    words = damaged.of("mlp.experts.1.up_proj.qweight").clone()
    words[:, 4:] = 0
    damaged.set("mlp.experts.1.up_proj.qweight", words)
    found = failed_items(damaged, tmp_path / "damaged")
    name = f"{damaged.layer}mlp.experts.1.up_proj.qweight"
    assert words_of(found[0], name).startswith(f"the values in rows 32 to 63 of {name}, half of it")


@pytest.mark.parametrize("form", ["compressed-tensors, int4", "modelopt nvfp4", "MLX, 4 bits"])
def test_scales_of_another_linear_are_named(tmp_path: Path, form: str) -> None:
    damaged = sound(GLM, form)
    parts = tensors_of(damaged, "mlp.experts.0.down_proj")
    last = next(one for one in ("weight_scale", "scales") if one in parts)
    damaged.set(f"mlp.experts.1.down_proj.{last}", parts[last])
    item = failed_items(damaged, tmp_path / "damaged")[0]
    assert item.name == "scales of their own"
    for number in (0, 1):
        assert f"{damaged.layer}mlp.experts.{number}.down_proj." in item.cause


def test_scales_that_are_all_one_are_named(tmp_path: Path) -> None:
    damaged = sound(GLM, "MLX, 4 bits")
    change(damaged, "self_attn.o_proj", ("scales",), torch.ones_like)
    item = failed_items(damaged, tmp_path / "damaged")[0]
    name = f"{damaged.layer}self_attn.o_proj.weight"
    assert words_of(item, name).startswith(f"every scale of {name} is 1")


def test_a_part_of_a_norm_that_was_filled_is_named(tmp_path: Path) -> None:
    damaged = sound(GLM, "bf16")
    norm = damaged.of("hnorm.weight").clone()
    norm[64:] = 1
    damaged.set("hnorm.weight", norm)
    (item,) = failed_items(damaged, tmp_path / "damaged")
    name = f"{damaged.layer}hnorm.weight"
    assert f"elements 64 to 127 of {name} are 1, half of it" in words_of(item, name)
