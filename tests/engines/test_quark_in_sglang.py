"""Quark's lists as SGLang's own classes of drafts take them: `verify` fails what SGLang would build
in another precision than it is stored in, and passes the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import sglang_wheel
from resolver_sources import SOURCES
from test_foreign_readers import draft_alone, stored_quantized, verdict_of
from test_resolvers import Answers, run, sglang_block

from cases import edit_json, make_checkpoint, read_json, run_program
from quantized_by_others import LINEAR
from verify.foreign_sources import DEEPSEEK, GLM, Checkpoint, released

# Of torch.jit, which the engines still use.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

FP8 = {"dtype": "fp8_e4m3", "qscheme": "per_channel", "is_dynamic": False}
INPUTS = {"dtype": "fp8_e4m3", "qscheme": "per_channel", "is_dynamic": True}
MODELS = ("glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "deepseek_v3", "deepseek_v3 of 3 layers")
# By a name, the entries of a list for a layer N: LAYER stands for model.layers.N.
LISTS: dict[str, list[str]] = {
    "the head": ["lm_head"],
    "the layer": ["LAYER"],
    "each linear": ["EACH"],
    "each linear but the projection": ["EACH but eh_proj"],
    "a pattern": ["re:LAYER.*"],
    "an escaped pattern": ["re:ESCAPED(\\.|$)"],
    "SGLang's own layer": ["re:model\\.decoder(\\.|$)"],
    "SGLang's own layer and projection": ["re:model\\.decoder(\\.|$)", "model.eh_proj"],
    "one expert": ["LAYER.mlp.experts.0.gate_proj"],
    "experts": ["LAYER.mlp.experts"],
    "attention of all": ["re:.*self_attn"],
    "layers of that digit": ["re:LAYER[0-9]?\\..*"],
}


def source_of(model: str, folder: Path) -> Checkpoint:
    if model == "glm4_moe":
        return released(GLM)
    if model.startswith("deepseek_v3"):
        found = draft_alone(DEEPSEEK, "fp8", "unquantized")
        if "of 3" in model:
            before, found.config["num_hidden_layers"] = found.layer, 3
            found.tensors = {n.replace(before, found.layer): t for n, t in found.tensors.items()}
        return found
    own = {key: one for key, one in SOURCES[model].items() if key != "quantization_config"}
    return released(make_checkpoint(folder, own))


def listed(entries: list[str], checkpoint: Checkpoint) -> list[str]:
    layer = checkpoint.layer.removesuffix(".")
    if entries[0].startswith("EACH"):
        own = [name for name in checkpoint.mtp() if LINEAR.match(name) or "eh_proj" in name]
        names = (name.removesuffix(".weight") for name in own)
        return [name for name in names if "but" not in entries[0] or "eh_proj" not in name]
    escaped = layer.replace(".", "\\.")
    return [entry.replace("LAYER", layer).replace("ESCAPED", escaped) for entry in entries]


def write(checkpoint: Checkpoint, exclude: list[str], folder: Path, *, in_fp8: bool) -> None:
    """The checkpoint as Quark's, with the linears of its MTP layer in fp8 or as they are."""
    for name, tensor in [*checkpoint.mtp().items()]:
        if in_fp8 and LINEAR.match(name) and "eh_proj" not in name:
            checkpoint.tensors[name] = tensor.float().clamp(-440, 440).to(torch.float8_e4m3fn)
            checkpoint.tensors[f"{name}_scale"] = torch.ones(len(tensor))
        elif tensor.dim() > 1:
            checkpoint.tensors[name] = tensor.to(torch.bfloat16)
    checkpoint.config["quantization_config"] = {
        "quant_method": "quark",
        "global_quant_config": {"weight": FP8, "input_tensors": INPUTS},
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "export": {"kv_cache_group": [], "pack_method": "reorder"},
        "exclude": exclude,
    }
    checkpoint.save(folder)


CASES = [(model, lists, in_fp8) for model in MODELS for lists in LISTS for in_fp8 in (False, True)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    root = tmp_path_factory.mktemp("quark")
    for number, (model, name, in_fp8) in enumerate(CASES):
        checkpoint = source_of(model, root / f"source-{number}")
        found[f"{model}; {name}; {in_fp8}"] = root / str(number)
        entries = listed(LISTS[name], checkpoint)
        write(checkpoint, entries, root / str(number), in_fp8=in_fp8)
    return found


@pytest.fixture(scope="module")
def answers(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Answers:
    drafts = {}
    for name, folder in folders.items():
        config = read_json(folder / "config.json")
        modules = sglang_block(config, "model.decoder", dense=False, indexer="index_topk" in config)
        drafts[name] = {"config": config, "modules": modules}
    job = {"wheel": str(sglang_wheel()), "drafts": drafts}
    return run("sglang_foreign.py", job, tmp_path_factory.mktemp("sglang"))


def test_integers_are_refused(tmp_path: Path) -> None:
    """As the main model of a Quark's folder, by SGLang and by `verify`."""
    checkpoint = released(GLM)
    for name, tensor in [*checkpoint.tensors.items()]:
        if LINEAR.match(name) and not name.startswith(checkpoint.layer):
            checkpoint.tensors[name] = tensor.float().clamp(-1, 1).mul(127).to(torch.int8)
            checkpoint.tensors[f"{name}_scale"] = torch.ones(len(tensor), dtype=torch.bfloat16)
            checkpoint.tensors[f"{name}_zero_point"] = torch.zeros(len(tensor), dtype=torch.int8)
    write(checkpoint, ["re:model\\.decoder"], tmp_path / "folder", in_fp8=False)
    weight = {"dtype": "int8", "qscheme": "per_channel", "is_dynamic": False}
    edit_json(
        tmp_path / "folder/config.json",
        lambda config: config["quantization_config"]["global_quant_config"].update(
            weight=weight, input_tensors=None
        ),
    )
    asked = {"config": read_json(tmp_path / "folder/config.json"), "modules": ["model.layers.1.o"]}
    job = {"wheel": str(sglang_wheel()), "drafts": {"int8": asked}}
    answer = run("sglang_foreign.py", job, tmp_path / "sglang")["int8"]
    assert "No quark compatible scheme" in answer["refused"]
    outcome = run_program("verify", tmp_path / "folder", "--level", "files", "--json", "--quiet")
    checks = json.loads(outcome.out)["checks"]
    (item,) = (one for check in checks for one in check["items"] if "SGLang reads" in one["name"])
    assert item["status"] == "not tested"
    assert "does not read a main model in quark_int8" in item["cause"]


def wanted(folder: Path, answer: dict[str, Any]) -> str:
    found = verdict_of(folder, answer, loads_head=False)
    layer = f"model.layers.{read_json(folder / 'config.json')['num_hidden_layers']}."
    projection = stored_quantized(folder, layer)[f"{layer}eh_proj"]
    return "fail" if found == "pass" and answer["projection"] != projection else found


@pytest.mark.parametrize("case", [f"{model}; {name}; {in_fp8}" for model, name, in_fp8 in CASES])
def test_verdicts_are_sglang_s(case: str, folders: dict[str, Path], answers: Answers) -> None:
    outcome = run_program("verify", folders[case], "--level", "files", "--json", "--quiet")
    checks = json.loads(outcome.out)["checks"]
    found = {item["name"]: item for check in checks for item in check["items"]}
    should = wanted(folders[case], answers[case])
    item = found.get("mtp: precision as SGLang reads it")
    if item is None:  # another stands for what every engine finds
        assert found["mtp: left out of quantization as stored"]["status"] == should == "fail"
        return
    assert item["status"] == should, (item, answers[case])


def test_every_class_passes_and_fails_some(folders: dict[str, Path], answers: Answers) -> None:
    by_model: dict[str, set[str]] = {model: set() for model in MODELS}
    for case, folder in folders.items():
        by_model[case.partition(";")[0]].add(wanted(folder, answers[case]))
    assert all(found == {"pass", "fail"} for found in by_model.values()), by_model
