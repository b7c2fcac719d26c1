"""Quark's checkpoints: its list of unquantized modules, beside how the MTP module is stored, in
numbers that are read here and in others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from verify.foreign import GLM, GLM_MTP, Tensors, as_is, rewritten
from verify.test_foreign_checkpoints import failures, verified

ITEM = "mtp: in Quark's exclude as stored"
LAYER = GLM_MTP.rstrip(".")
NUMBERS = {"weight": {"dtype": "fp8_e5m2", "qscheme": "per_channel"}}  # not decoded
READ = {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_channel"}}
AS_READ = "mtp: precision as vLLM reads it"


def written(folder: Path, exclude: Any, tensors: Any = as_is, **fields: Any) -> Path:
    quantization = {
        "quant_method": "quark",
        "global_quant_config": NUMBERS,
        "exclude": exclude,
        **fields,
    }
    return rewritten(
        GLM, folder, tensors, config=lambda own: own.update(quantization_config=quantization)
    )


def in_fp8(stored: Tensors) -> None:
    """The layer's linears as Quark packs them."""
    for name in [*stored]:
        if name.startswith(GLM_MTP) and name.endswith("_proj.weight") and "eh_proj" not in name:
            stored[name] = stored[name].to(torch.float8_e4m3fn)
            stored[f"{name}_scale"] = torch.ones(stored[name].shape[0])


def test_a_layer_that_is_listed_passes(tmp_path: Path) -> None:
    names = ["q_proj", "k_proj", "v_proj", "o_proj"]
    shared = [f"mlp.shared_experts.{name}" for name in ("gate_proj", "up_proj", "down_proj")]
    whole = [f"{LAYER}.{name}" for name in (*(f"self_attn.{one}" for one in names), *shared)]
    for number, exclude in enumerate(
        [
            [r"re:model\.layers\.3\."],
            [*whole, f"{LAYER}.mlp.experts"],
            [*whole, f"{LAYER}.mlp.experts.0.gate_proj"],
        ]
    ):
        _, items = verified(written(tmp_path / str(number), exclude))
        assert items[ITEM]["status"] == "pass"
        assert items[ITEM]["figure"] == "31 linears"
    _, items = verified(written(tmp_path / "quantized", ["lm_head"], in_fp8))
    assert items[ITEM]["status"] == "pass"


def test_a_layer_that_is_not_listed_is_named_with_the_entry(tmp_path: Path) -> None:
    outcome, items = verified(written(tmp_path / "none", None))
    assert (outcome.code, failures(items)) == (7, {ITEM})
    cause = items[ITEM]["cause"]
    assert "31 matrices" in cause and r"add re:model\.layers\.3\. to exclude" in cause
    assert "matches no module" not in cause
    _, items = verified(written(tmp_path / "glob", ["lm_head", "model.layers.3*"]))
    assert "(model.layers.3* in exclude matches no module of it)" in items[ITEM]["cause"]
    _, items = verified(written(tmp_path / "experts", [r"re:.*experts$"]))
    assert "7 matrices of the MTP module" in items[ITEM]["cause"]


def test_a_quantized_layer_that_is_listed_is_named_with_the_entry(tmp_path: Path) -> None:
    outcome, items = verified(written(tmp_path / "listed", [r"re:model\.layers\.3\."], in_fp8))
    assert (outcome.code, failures(items)) == (7, {ITEM})
    assert r"(re:model\.layers\.3\. in exclude)" in items[ITEM]["cause"]
    assert "31 matrices" in items[ITEM]["cause"]


@pytest.mark.parametrize("exclude", ["lm_head", ["re:("]])
@pytest.mark.parametrize("numbers", [NUMBERS, READ])
def test_unusable_lists_are_named(tmp_path: Path, exclude: Any, numbers: dict[str, Any]) -> None:
    outcome, items = verified(written(tmp_path / "written", exclude, global_quant_config=numbers))
    assert outcome.code == 7
    assert "no usable quantization_config.exclude" in outcome.out
    assert ITEM not in items


@pytest.mark.parametrize("numbers", [None, {"weight": None}])
def test_a_config_of_no_numbers_passes(tmp_path: Path, numbers: dict[str, Any] | None) -> None:
    outcome, items = verified(written(tmp_path / "written", [], global_quant_config=numbers))
    assert outcome.code == 0 and ITEM not in items


def test_numbers_that_are_read_are_judged_as_any_other(tmp_path: Path) -> None:
    def failed(name: str, exclude: list[str] | None, tensors: Any = as_is) -> dict[str, str]:
        folder = written(tmp_path / name, exclude, tensors, global_quant_config=READ)
        _, items = verified(folder)
        assert ITEM not in items
        if in_sglang := items.get("mtp: precision as SGLang reads it"):
            assert in_sglang["status"] == "not tested" and "not repeated" in in_sglang["cause"]
        return {item: items[item]["cause"] for item in failures(items)}

    assert failed("listed", [r"re:model\.layers\.3\."]) == {}
    assert failed("quantized", ["lm_head"], in_fp8) == {}
    for name, exclude in {"none": None, "glob": ["lm_head", "model.layers.3*"]}.items():
        found = failed(name, exclude)
        assert found.keys() == {AS_READ}
        assert "31 matrices" in found[AS_READ] and "to exclude" in found[AS_READ]
    assert "(model.layers.3* in exclude matches no module" in found[AS_READ]
    (cause,) = failed("both", [r"re:model\.layers\.3\."], in_fp8).values()
    assert r"(re:model\.layers\.3\. in exclude)" in cause and "31 matrices" in cause
