"""Quark's checkpoints: its list of unquantized modules, beside how the MTP module is stored, in
numbers that are read here and in others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cases import make_checkpoint, read_json, read_tensors
from mtp_checkpoints.families.base import Role
from mtp_checkpoints.quantization.methods import quant_config_of
from mtp_checkpoints.quantization.sglang_quark import quark_draft, quark_of_sglang
from runtime.checkpoints import SMALL_CONFIGS
from verify.foreign import GLM, GLM_MTP, Tensors, as_is, rewritten, without
from verify.test_foreign_checkpoints import failures, verified

ITEM = "mtp: in Quark's exclude as stored"
LAYER = GLM_MTP.rstrip(".")
NUMBERS = {"weight": {"dtype": "fp8_e5m2", "qscheme": "per_channel"}}  # not decoded
READ = {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_channel"}}
AS_READ = "mtp: precision as vLLM reads it"
AS_SGLANG_READS = "mtp: precision as SGLang reads it"


def written(folder: Path, exclude: Any, tensors: Any = as_is, **fields: Any) -> Path:
    quantization = {
        "quant_method": "quark",
        "global_quant_config": NUMBERS,
        "export": {"kv_cache_group": []},
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
        return {item: items[item]["cause"] for item in failures(items)}

    # SGLang's class of GLM-4.5 looks for model.decoder, and renames nothing.
    assert failed("listed", [r"re:model\.layers\.3\."]).keys() == {AS_SGLANG_READS}
    assert failed("of SGLang", [r"re:model\.(decoder|layers\.3)\."]) == {}
    assert failed("quantized", ["lm_head"], in_fp8) == {}
    for name, exclude in {"none": None, "glob": ["lm_head", "model.layers.3*"]}.items():
        found = failed(name, exclude)
        assert found.keys() == {AS_READ, AS_SGLANG_READS}
        assert all("31 matrices" in cause and "to exclude" in cause for cause in found.values())
        assert r", re:model\.decoder(\.|$) to exclude" in found[AS_SGLANG_READS]
        assert ("matches no module" in found[AS_READ]) is (name == "glob")  # of what is written
    assert "(model.layers.3* in exclude matches no module" in found[AS_READ]
    found = failed("both", [r"re:model\.layers\.3\."], in_fp8)
    assert found.keys() == {AS_READ}
    assert r"(re:model\.layers\.3\. in exclude)" in found[AS_READ]
    assert "31 matrices" in found[AS_READ]
    twice = [r"re:model\.layers\.3\.", r"re:.*layers\.3\..*"]  # its numbers are no entries
    found = failed("twice", twice, in_fp8)
    assert f"({' and '.join(f'{one} in exclude' for one in twice)})" in found[AS_READ]


@pytest.mark.parametrize(
    ("entries", "plain"),
    [
        (["model.layers.61"], True),
        (["re:model.layers.61"], True),
        ([r"re:model\.layers\.61(\.|$)"], False),
        (["model.layers.61.eh_proj"], False),  # SGLang asks for model.eh_proj
        (["model.eh_proj"], True),
    ],
)
def test_projections_of_deepseek_in_sglang(entries: list[str], plain: bool) -> None:
    """They are linears of Quark's unless the whole layer is left out, or they are."""
    config = {"architectures": ["DeepseekV3ForCausalLM"], "num_hidden_layers": 61}
    quantization = {"quant_method": "quark", "global_quant_config": READ, "exclude": entries}
    known = quark_draft(config)
    assert known is not None and quark_draft(config | {"architectures": ["Step3p5"]}) is None
    read = quant_config_of(quark_of_sglang(config, quantization))
    assert (read.format_of(known.projection, Role.MTP_PROJECTION) is None) is plain


def test_a_projection_that_sglang_builds_quantized_is_named(tmp_path: Path) -> None:
    """In GLM-5's class, which else finds the entries of the layer."""
    source = make_checkpoint(tmp_path / "source", SMALL_CONFIGS["glm_moe_dsa"])
    layer = f"model.layers.{read_json(source / 'config.json')['num_hidden_layers']}"
    linears = {f"{layer}.{name}" for name in ("self_attn", "mlp", "eh_proj")}

    def status(name: str, left: set[str]) -> tuple[str, str]:
        names = [n.removesuffix(".weight") for n in read_tensors(source) if n.endswith(".weight")]
        exclude = [n for n in names if n.startswith(tuple(left))]
        own = {"quant_method": "quark", "global_quant_config": READ, "exclude": exclude}
        own["export"] = {"kv_cache_group": []}
        folder = rewritten(
            source,
            tmp_path / name,
            without("model.layers.0."),
            lambda config: config.update(quantization_config=own),
        )
        item = verified(folder)[1][AS_SGLANG_READS]
        return item["status"], item.get("cause", "")

    assert status("all", linears)[0] == "pass"
    found, cause = status("but one", linears - {f"{layer}.eh_proj"})
    assert found == "fail" and "model.eh_proj to exclude" in cause


EXPORTS: dict[str, tuple[dict[str, Any], bool]] = {
    "no keys or values": ({"export": {"kv_cache_group": []}}, True),
    "nothing of the export": ({}, False),
    "no list": ({"export": {"pack_method": "reorder"}}, False),
    "a list without its numbers": ({"export": {"kv_cache_group": ["*k_proj"]}}, False),
}


@pytest.mark.parametrize("case", EXPORTS)
def test_a_config_that_engines_end_on_is_named(case: str, tmp_path: Path) -> None:
    """In one sentence for both."""
    fields, loads = EXPORTS[case]
    own = {"quant_method": "quark", "global_quant_config": READ, "exclude": ["re:.*"]}
    folder = rewritten(
        GLM,
        tmp_path / "quark",
        config=lambda config: config.update(quantization_config=own | fields),
    )
    _, items = verified(folder)
    found = {items[name]["status"] for name in (AS_READ, AS_SGLANG_READS)}
    assert found == {"pass" if loads else "fail"}
    said = {items[name].get("cause", "")[:37] for name in (AS_READ, AS_SGLANG_READS)}
    assert said == {"" if loads else "vLLM 0.32.0 and SGLang 0.5.23 end on "}


def test_lost_scales_of_some_experts_leave_the_others_quantized(tmp_path: Path) -> None:
    """Loaders find what is unquantized by its scales, and experts of a layer alike."""

    def change(stored: Tensors) -> None:
        in_fp8(stored)
        for name in [*stored]:
            if name.endswith("experts.1.down_proj.weight_scale"):
                del stored[name]

    source = written(tmp_path / "lost", [], change, global_quant_config=READ)
    items = verified(source)[1]
    found = " ".join(items[name]["cause"] for name in failures(items))
    assert "experts.1.down_proj.weight_scale is missing" in found
    assert "leaves them out" not in found
