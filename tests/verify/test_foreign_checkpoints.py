"""Checkpoints of others: verify tells from headers whether the MTP modules that config.json
announces are there, and repairs what a graft can."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cases import TARGET_OPTIONS, Outcome, edit_json, export, run_program, tree
from decoded_mains import write_mlx
from hub_server import HubServer
from mtp_checkpoints.families.base import TensorSpec
from mtp_checkpoints.families.spec import ModelSpec
from mtp_checkpoints.layouts import TARGETS
from quantized_by_others import read_all
from verify.foreign import (
    DEEPSEEK,
    FIXTURES,
    GLM,
    GLM_MTP,
    INDEX,
    Tensors,
    headers,
    quantized,
    rewritten,
    without,
)

Item = dict[str, Any]
PRESENCE = "MTP modules announced and there"
INDEXED = "MTP modules in the index"


def verified(place: object, *options: object) -> tuple[Outcome, dict[str, Item]]:
    """A verification at level files, and the items of its check `files` by name."""
    outcome = run_program("verify", place, "--level", "files", "--json", "--quiet", *options)
    assert outcome.code in (0, 7), outcome.err
    checks = json.loads(outcome.out)["checks"]
    return outcome, {item["name"]: item for item in checks[0]["items"]}


def failures(items: dict[str, Item]) -> set[str]:
    return {name for name, item in items.items() if item["status"] == "fail"}


@pytest.mark.parametrize("source", [GLM, DEEPSEEK], ids=lambda path: path.name)
def test_released_checkpoints_pass_and_nothing_is_written_into_them(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, listed, tensors = tree(source), [], ModelSpec._main

    def listing(family: ModelSpec) -> Iterator[TensorSpec]:
        listed.append(family)
        return tensors(family)

    monkeypatch.setattr(ModelSpec, "_main", listing)
    outcome, items = verified(source)
    assert outcome.code == 0, outcome.err
    assert len(listed) == 1  # of a main model of 46,000 tensors each time takes long
    assert items[PRESENCE]["status"] == "pass"
    assert json.loads(outcome.out)["bundle"]["kind"] == "checkpoint"
    assert tree(source) == before


def test_lost_modules_end_with_7_and_the_command_that_repairs_them(tmp_path: Path) -> None:
    lost = rewritten(GLM, tmp_path / "lost", without(GLM_MTP))
    (lost / "README.md").write_text("---\nlicense: mit\nbase_model:\n- acme/GLM\n---\n# A model\n")
    outcome, items = verified(lost)
    assert outcome.code == 7
    assert failures(items) == {PRESENCE}
    assert "1 MTP module (num_nextn_predict_layers)" in items[PRESENCE]["cause"]
    command = f"mtp-export graft --main {lost} --mtp hf://acme/GLM --output-dir BUNDLE"
    assert items[PRESENCE]["repair"] == command
    assert command in outcome.err
    _, items = verified(lost, "--source", GLM)
    program, *arguments = items[PRESENCE]["repair"].split()
    assert program == "mtp-export"
    bundle = tmp_path / "bundle"
    repaired = run_program(*(bundle if word == "BUNDLE" else word for word in arguments))
    assert repaired.code == 0, repaired.err
    assert run_program("verify", bundle, "--level", "weights", "--quiet").code == 0


def test_modules_that_no_field_announces_fail(tmp_path: Path) -> None:
    folder = rewritten(
        GLM, tmp_path / "silent", config=lambda fields: fields.pop("num_nextn_predict_layers")
    )
    outcome, items = verified(folder)
    assert (outcome.code, failures(items)) == (7, {PRESENCE})
    assert "without speculation" in items[PRESENCE]["cause"]


def test_a_model_without_a_runtime_is_named(tmp_path: Path) -> None:
    """Of levels files and weights all is judged that its names and values tell."""
    folder = rewritten(GLM, tmp_path / "x", config=lambda own: own.update(model_type="foo_moe"))
    outcome = run_program("verify", folder, "--level", "run", "--json", "--quiet")
    assert outcome.code == 0, outcome.err
    checks = {check["name"]: check for check in json.loads(outcome.out)["checks"]}
    for name in ("greedy", "acceptance", "likelihood", "speed"):
        (item,) = checks[name]["items"]
        assert item["status"] == "not tested"
        assert item["cause"].startswith("no runtime for foo_moe: This model type is not supported")
    assert {checks[name]["status"] for name in ("files", "ledger")} == {"pass"}


def test_no_module_and_none_announced_is_not_tested(tmp_path: Path) -> None:
    folder = rewritten(
        GLM,
        tmp_path / "none",
        without(GLM_MTP),
        config=lambda fields: fields.pop("num_nextn_predict_layers"),
    )
    outcome, items = verified(folder)
    assert outcome.code == 0
    assert items[PRESENCE]["status"] == "not tested"
    assert "graft" in items[PRESENCE]["repair"]


def test_experts_that_are_not_there_are_named(tmp_path: Path) -> None:
    part = rewritten(GLM, tmp_path / "part", without(f"{GLM_MTP}mlp.experts.2."))
    outcome, items = verified(part)
    assert outcome.code == 7
    assert "lacks expert 2 (of 8)" in items["MTP modules complete"]["cause"]
    assert failures(items) == {"MTP modules complete", "mtp: tensors"}


QWEN = {
    "model_type": "of_no_family",
    "text_config": {"num_hidden_layers": 2, "mtp_num_hidden_layers": 1, "num_experts": 2},
}
MAIN = ("model.language_model.layers.0.norm.weight", "model.language_model.layers.1.norm.weight")
QWEN_MTP = (
    *("mtp.fc.weight", "mtp.norm.weight", "mtp.pre_fc_norm_hidden.weight"),
    *("mtp.layers.0.mlp.experts.0.up_proj.weight", "mtp.layers.0.mlp.experts.1.up_proj.weight"),
)


def test_models_without_a_family_are_judged_by_their_names(tmp_path: Path) -> None:
    names = dict.fromkeys((*MAIN, *QWEN_MTP))
    outcome, items = verified(headers(tmp_path / "whole", QWEN, names))
    assert (outcome.code, failures(items)) == (0, set())
    assert items[PRESENCE]["figure"] == "1 of 1, 5 tensors"
    assert items["main: config"]["status"] == "not tested"
    outcome, items = verified(headers(tmp_path / "lost", QWEN, dict.fromkeys(MAIN)))
    assert (outcome.code, failures(items)) == (7, {PRESENCE})
    assert "text_config.mtp_num_hidden_layers" in items[PRESENCE]["cause"]
    assert items[PRESENCE]["repair"] == ""
    some = dict.fromkeys((*MAIN, *QWEN_MTP[1:-1]))
    outcome, items = verified(headers(tmp_path / "some", QWEN, some))
    assert failures(items) == {"MTP modules complete"}
    words = items["MTP modules complete"]["cause"]
    assert "projection" in words
    assert "lacks expert 1 (of 2)" in words


def test_codes_without_scales_are_named(tmp_path: Path) -> None:
    code = torch.float8_e4m3fn
    names = dict.fromkeys((*MAIN, *QWEN_MTP)) | {
        "mtp.layers.0.self_attn.q_proj.weight": code,
        "mtp.layers.0.self_attn.k_proj.weight": code,
        "mtp.layers.0.self_attn.k_proj.weight_scale_inv": torch.float32,
        "mtp.layers.0.self_attn.o_proj.weight_scale": torch.float32,
    }
    _, items = verified(headers(tmp_path / "codes", QWEN, names))
    words = items["MTP modules complete"]["cause"]
    assert "q_proj.weight holds F8_E4M3 codes, and no scale" in words
    assert "o_proj.weight_scale is a scale, and its weight is missing" in words
    assert "k_proj" not in words


@pytest.mark.parametrize(
    ("kind", "config", "tensor"),
    [
        ("DSpark", {"dspark_block_size": 5}, "mtp.0.main_norm.weight"),
        ("DSpark", {}, "mtp.0.markov_head.weight"),
        ("EAGLE-3", {"architectures": ["LlamaForCausalLMEagle3"]}, "fc.weight"),
        ("EAGLE-3", {}, "d2t"),
        ("Medusa", {}, "medusa_head.0.linear.weight"),
    ],
)
def test_other_drafts_are_named_not_judged(
    tmp_path: Path, kind: str, config: dict[str, Any], tensor: str
) -> None:
    fields = {"model_type": "mistral4", "num_nextn_predict_layers": 1, "num_hidden_layers": 2}
    names = dict.fromkeys([tensor, "norm.weight"])
    if tensor.startswith("mtp."):
        names["model.layers.0.norm.weight"] = None
    outcome, items = verified(headers(tmp_path / "draft", fields | config, names))
    assert outcome.code == 0
    assert PRESENCE not in items
    assert f"the draft here is {kind}, not MTP" in items["MTP modules"]["cause"]


@pytest.mark.parametrize(
    ("kind", "tensor"),
    [
        ("EAGLE", "eagle_module.fc.weight"),
        ("EAGLE-3", "midlayer.hidden_norm.weight"),
        ("Medusa", "medusa_heads.0.0.linear.weight"),
    ],
)
def test_other_drafts_beside_the_main_model_are_named(
    tmp_path: Path, kind: str, tensor: str
) -> None:
    names = dict.fromkeys((*MAIN, tensor))
    words = f"the draft here is {kind}, not MTP (there is a tensor {tensor})"
    outcome, items = verified(headers(tmp_path / "announced", QWEN, names))
    assert (outcome.code, failures(items)) == (7, {PRESENCE})
    assert f"no tensor of any is there: {words}" in items[PRESENCE]["cause"]
    config = QWEN | {"text_config": {"num_hidden_layers": 2}}
    outcome, items = verified(headers(tmp_path / "alone", config, names))
    assert (outcome.code, items[PRESENCE]["status"]) == (0, "not tested")
    assert items[PRESENCE]["cause"].startswith(words)
    both = dict.fromkeys((*MAIN, *QWEN_MTP, tensor))
    outcome, items = verified(headers(tmp_path / "both", QWEN, both))
    assert (outcome.code, items[PRESENCE]["status"]) == (0, "pass")


@pytest.mark.parametrize("target", TARGETS)
def test_draft_folders_of_every_target_are_judged_alone(tmp_path: Path, target: str) -> None:
    options = ("--target", target, *TARGET_OPTIONS.get(target, ()))
    assert export(DEEPSEEK, tmp_path / "bundle", *options, "--quiet").code == 0
    outcome, items = verified(tmp_path / "bundle/mtp")
    assert (outcome.code, failures(items)) == (0, set())
    assert items["mtp: tensors"]["status"] == "pass"


def test_a_file_outside_the_index_is_named(tmp_path: Path) -> None:
    folder = rewritten(GLM, tmp_path / "outside")
    stored = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    mtp = {name: tensor for name, tensor in stored.items() if name.startswith(GLM_MTP)}
    main = {name: tensor for name, tensor in stored.items() if name not in mtp}
    save_file(main, folder / "model-00001-of-00001.safetensors")
    save_file(mtp, folder / "mtp.safetensors")
    index = {"weight_map": dict.fromkeys(main, "model-00001-of-00001.safetensors")}
    (folder / INDEX).write_text(json.dumps(index))
    item = f"{INDEXED}, as vLLM reads it"
    outcome, items = verified(folder)
    assert (outcome.code, failures(items)) == (7, {item})
    assert "mtp.safetensors" in items[item]["cause"]
    assert "this checkpoint for vLLM; " in outcome.err
    assert ". --engine sglang judges it for SGLang alone: no fault in head" in outcome.err
    outcome, items = verified(folder, "--engine", "sglang")
    assert (outcome.code, failures(items)) == (0, set())
    (folder / "mtp.safetensors").rename(folder / "draft.safetensors")  # which SGLang adds to none
    for engine in ((), ("--engine", "sglang")):
        outcome, items = verified(folder, *engine)
        assert (outcome.code, failures(items)) == (7, {INDEXED})


@pytest.mark.parametrize(
    ("quantization", "files", "words"),
    [
        (
            {"quant_method": "compressed-tensors", "version": "0.20.0"},
            {"recipe__yaml": "x"},
            "llm-compressor (compressed-tensors 0.20.0)",
        ),
        ({"quant_method": "compressed-tensors", "version": "9"}, {}, "compressed-tensors 9"),
        ({"quant_method": "auto-round", "autoround_version": "0.16.1"}, {}, "AutoRound 0.16.1"),
        ({"quant_method": "gptq", "autoround_version": "0.16.1"}, {}, "AutoRound 0.16.1"),
        (
            {"quant_method": "gptq", "meta": {"quantizer": ["gptqmodel:7.7.0"]}},
            {},
            "GPTQModel 7.7.0",
        ),
        (
            {"quant_method": "modelopt", "producer": {"name": "modelopt", "version": "0.47.0"}},
            {},
            "ModelOpt 0.47.0",
        ),
        ({"quant_method": "quark", "version": "0.9"}, {}, "Quark 0.9"),
        ({"quant_method": "bitsandbytes"}, {}, "bitsandbytes"),
    ],
)
def test_the_tool_that_wrote_it_is_named(
    tmp_path: Path, quantization: dict[str, Any], files: dict[str, str], words: str
) -> None:
    config = QWEN | {"quantization_config": quantization}
    folder = headers(tmp_path / "written", config, dict.fromkeys(MAIN), **files)
    _, items = verified(folder)
    assert items["written by"]["figure"].startswith(f"{words}, quantization")
    known = words.startswith(("llm-compressor", "GPTQModel 7.7.0", "ModelOpt 0.47.0"))
    assert ("saves no MTP layer" in items[PRESENCE]["cause"]) == known


def test_mlx_is_named(tmp_path: Path) -> None:
    config = QWEN | {"quantization": {"group_size": 64, "bits": 4}}
    _, items = verified(headers(tmp_path / "mlx", config, dict.fromkeys((*MAIN, *QWEN_MTP))))
    assert items["written by"]["figure"] == "mlx-lm, quantization MLX affine"


@pytest.mark.parametrize(("source", "layer"), [(GLM, GLM_MTP), (FIXTURES / "qwen3-5-tiny", "mtp.")])
def test_mlx_tells_an_unquantized_module_by_its_tensors(
    tmp_path: Path, source: Path, layer: str
) -> None:
    """As mlx-lm's `load_model`, which asks for scales where its config names no module."""
    folder = write_mlx(source, tmp_path / "mlx", layer)
    mtp = {name: one for name, one in read_all(source).items() if name.startswith(layer)}
    save_file(load_file(folder / "model.safetensors") | mtp, folder / "model.safetensors")
    outcome, items = verified(folder)
    assert (outcome.code, failures(items)) == (0, set())


def test_a_broken_index_is_a_failed_item_not_an_error(tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    rewritten(GLM, folder)
    (folder / INDEX).write_text("{}")
    outcome, items = verified(folder)
    assert (outcome.code, failures(items)) == (7, {"headers and index"})


def test_a_repository_is_judged_by_its_headers_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = rewritten(GLM, tmp_path / "lost", without(GLM_MTP))
    server = HubServer()
    server.serve("acme/good", GLM)
    server.serve("acme/lost", lost)
    with server.running():
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        outcome = run_program("verify", "hf://acme/good", "--quiet", "--json")
        assert outcome.code == 0, outcome.err
        checks = {check["name"]: check for check in json.loads(outcome.out)["checks"]}
        assert checks["files"]["status"] == "pass"
        for name in ("ledger", "weights", "acceptance"):
            words = checks[name]["items"][0]["cause"]
            assert "nothing but headers is downloaded: --level weights reads the MTP mod" in words
            assert "(hf download acme/good --local-dir DIR)" in words
        outcome = run_program("verify", "hf://acme/lost", "--quiet")
        assert outcome.code == 7
        assert "graft --main hf://acme/lost" in outcome.err


def test_the_weights_of_a_repository_s_mtp_module_are_read_by_ranges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Little else is downloaded, and nothing is written."""

    def not_finite(stored: Tensors) -> None:
        stored[f"{GLM_MTP}self_attn.q_proj.weight"][3, 5] = float("nan")

    bad = rewritten(GLM, tmp_path / "bad", not_finite)
    mtp = sum(t.nbytes for name, t in read_all(GLM).items() if name.startswith(GLM_MTP))
    server, level = HubServer(), ("--level", "weights", "--quiet", "--json")
    server.serve("acme/good", GLM)
    server.serve("acme/bad", bad)
    before = tree(tmp_path)
    with server.running():
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        outcome = run_program("verify", "hf://acme/good", *level)
        assert outcome.code == 0, outcome.err
        received = sum(request.sent_bytes for request in server.log if request.status == 206)
        assert mtp < received < 2.2 * mtp  # small linears are read again for blocks
        checks = {check["name"]: check for check in json.loads(outcome.out)["checks"]}
        items = {item["name"]: item for item in checks["ledger"]["items"]}
        assert items["mtp: finite values, sound scales"]["status"] == "pass"
        assert items["mtp: halves of eh_proj"]["status"] == "pass"
        assert items["main: tensors"]["cause"] == "the MTP module's bytes alone are downloaded"
        assert "hf download" in checks["weights"]["items"][0]["cause"]
        outcome = run_program("verify", "hf://acme/bad", *level)
        assert outcome.code == 7 and "self_attn.q_proj" in outcome.err
    assert tree(tmp_path) == before


def test_a_place_without_either_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing")
    outcome = run_program("verify", tmp_path)
    assert outcome.code == 3
    assert "neither a bundle nor a checkpoint" in outcome.err
    edit = tmp_path / "config.json"
    edit.write_text("{}")
    edit_json(edit, lambda fields: fields.update(model_type="glm4_moe"))
    assert run_program("verify", tmp_path, "--level", "files").code == 7


def test_a_repository_s_index_comes_compressed(monkeypatch: pytest.MonkeyPatch) -> None:
    server = HubServer()
    server.serve("acme/good", DEEPSEEK)
    with server.running():
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        assert run_program("verify", "hf://acme/good", "--quiet").code == 0
        sent = [one.sent_bytes for one in server.log if one.path.endswith(INDEX)]
    assert 0 < sum(sent) < (DEEPSEEK / INDEX).stat().st_size / 4


def test_a_partly_lost_module_is_replaced_by_the_command_that_is_named(tmp_path: Path) -> None:
    part = quantized(GLM, tmp_path / "part", "compressed-tensors, int4")
    _, items = verified(part, "--source", GLM)
    assert failures(items) == {"mtp: left out of quantization as stored"}
    lost = rewritten(part, tmp_path / "lost", without(f"{GLM_MTP}mlp.experts.2."))
    _, items = verified(lost, "--source", GLM)
    program, *arguments = items["MTP modules complete"]["repair"].split()
    assert (program, arguments[-1]) == ("mtp-export", "--replace")
    bundle = tmp_path / "bundle"
    repaired = run_program(*(bundle if word == "BUNDLE" else word for word in arguments))
    assert repaired.code == 0, repaired.err
    stored = load_file(next((bundle / "main").glob("*.safetensors")))
    assert not [name for name in stored if name.startswith(GLM_MTP)]
    assert run_program("verify", bundle, "--level", "weights", "--quiet").code == 0
    without_it = run_program(*arguments[:-3], "--output-dir", tmp_path / "refused")
    assert without_it.code == 3
    assert "--replace" in without_it.err


def test_main_and_mtp_in_two_folders_are_judged_together(tmp_path: Path) -> None:
    """The layer of the original, of a bundle's draft, or of a folder that has nothing else."""
    lost = rewritten(GLM, tmp_path / "lost", without(GLM_MTP))
    alone = rewritten(
        GLM,
        tmp_path / "alone",
        lambda stored: {name: one for name, one in stored.items() if name.startswith(GLM_MTP)},
    )
    assert export(GLM, tmp_path / "bundle", "--quiet").code == 0
    for mtp in (GLM, alone, tmp_path / "bundle/mtp"):
        outcome, items = verified(lost, "--mtp", mtp)
        assert (outcome.code, failures(items)) == (0, set()), outcome.err
        assert items["mtp: tensors"]["status"] == "pass"
    other = rewritten(
        alone,
        tmp_path / "other",
        lambda stored: {n: t for n, t in stored.items() if ".2." not in n},
    )
    outcome, items = verified(lost, "--mtp", other)
    assert "mtp: tensors" in failures(items)
    level = ("--level", "weights", "--json", "--quiet")
    outcome = run_program("verify", lost, "--mtp", alone, *level)
    assert outcome.code == 0, outcome.err
    checks = {check["name"]: check for check in json.loads(outcome.out)["checks"]}
    loaded = {item["name"]: item for item in checks["ledger"]["items"]}
    assert loaded["runtime loads it: every tensor explained"]["figure"].startswith("141 loaded")


def test_a_draft_of_its_own_folder_needs_neither_count_nor_tokenizer(tmp_path: Path) -> None:
    """Its own config counts its layer, and engines read the main model's tokenizer."""
    main = rewritten(GLM, tmp_path / "main", without(GLM_MTP))
    edit_json(main / "config.json", lambda config: config.update(num_nextn_predict_layers=0))
    alone = tmp_path / "alone"
    rewritten(
        GLM,
        alone,
        lambda stored: {name: one for name, one in stored.items() if name.startswith(GLM_MTP)},
    )
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (alone / name).unlink(missing_ok=True)
    outcome, items = verified(main, "--mtp", alone)
    assert (outcome.code, failures(items)) == (0, set()), outcome.err
    assert items["one tokenizer"]["status"] == "pass"
    level = ("--level", "weights", "--json", "--quiet")
    outcome = run_program("verify", main, "--mtp", alone, *level)
    assert outcome.code == 0, outcome.err
    (alone / "tokenizer.json").write_text("{}")
    _, items = verified(main, "--mtp", alone)
    assert "one tokenizer" in failures(items)


def test_inspect_counts_what_it_does_not_know(tmp_path: Path) -> None:
    folder = headers(tmp_path / "qwen", QWEN, dict.fromkeys((*MAIN, *QWEN_MTP)))
    outcome = run_program("inspect", folder, "--json")
    assert outcome.code == 0, outcome.err
    facts = json.loads(outcome.out)
    assert (facts["model_type"], facts["parts"], facts["mtp_layers"]) == (
        "of_no_family",
        ["main", "mtp"],
        [0],
    )
    counts = {one["part"]: (one["role"], one["tensors"]) for one in facts["amounts"]}
    assert counts == {"main": ("any", 2), "mtp": ("any", 5)}
    assert "model type is not supported" in facts["unknown"]
    known = rewritten(
        GLM,
        tmp_path / "quark",
        config=lambda fields: fields.update(quantization_config={"quant_method": "quark"}),
    )
    facts = json.loads(run_program("inspect", known, "--json").out)
    assert (facts["tensors"], facts["quantization"]) == (141, "quark")
    assert "does not read" in facts["unknown"]


def test_a_tokenizer_beside_a_main_model_that_does_not_open_is_not_called_missing(
    tmp_path: Path,
) -> None:
    folder = rewritten(GLM, tmp_path / "main", lambda _: None)
    (folder / "config.json").write_text("{")
    _, items = verified(folder)
    assert (
        items["main: tokenizer"]["cause"]
        == "the checkpoint cannot be opened: headers and index says why"
    )
