"""Lists that leave modules out of quantization: what they lack for the MTP module that is stored,
and the entry that is one too many."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cases import edit_json, read_json, run_program
from decoded_mains import BITSANDBYTES_NF4, nf4
from faults.small_model import family_config, write_dense
from mtp_checkpoints.families import family_of
from mtp_checkpoints.quantization.method import QuantConfig
from mtp_checkpoints.quantization.methods import METHODS as METHODS_READ
from mtp_checkpoints.quantization.methods import quant_config_of
from mtp_checkpoints.quantization.native import method_of
from mtp_checkpoints.quantization.stored import stored_model
from mtp_export.verify.diagnosis.causes.lists import not_left_out
from mtp_export.verify.files import list_entries
from mtp_export.verify.files.left_out import ListedDraft
from quantized_by_others import LINEAR, METHODS, unquantized
from verify import foreign_sources
from verify.foreign import (
    DEEPSEEK,
    FIXTURES,
    GLM,
    GLM_MTP,
    INDEX,
    Config,
    Tensors,
    mtp_left_out,
    quantized,
    rewritten,
)
from verify.foreign_folders import but_of, listed
from verify.foreign_sources import Checkpoint
from verify.test_foreign_checkpoints import failures, verified

ITEM = "mtp: left out of quantization as stored"
OF_VLLM, OF_SGLANG = (f"mtp: precision as {engine} reads it" for engine in ("vLLM", "SGLang"))
GATES = ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b")
# The key to add to, and the entry, of an unquantized MTP layer under each method.
LACKS = {
    "auto-round": r"^model\.layers\.3(\..*)?$ to extra_config",
    "compressed-tensors, int8": r"re:model.layers.3(\..*)?$, re:model.decoder(\..*)?$ to ignore",
    "fp8": "model.layers.3.self_attn.q_proj, model.layers.3.self_attn.k_proj and 14 more",
    "modelopt fp8, in a file": "model.layers.3*, model.decoder* to exclude_modules",
}


@pytest.mark.parametrize("method", LACKS)
def test_the_entry_that_lacks_is_named(tmp_path: Path, method: str) -> None:
    outcome, items = verified(quantized(GLM, tmp_path / "main", method))
    # SGLang's name of the layer lies in none of AutoRound's blocks: it builds it unquantized.
    item = OF_VLLM if method == "auto-round" else ITEM
    assert (outcome.code, failures(items)) == (7, {item})
    assert "stored unquantized" in items[item]["cause"]
    assert f"add {LACKS[method]}" in items[item]["cause"]


def test_an_idle_entry_of_a_file_of_modelopt_s_is_named(tmp_path: Path) -> None:
    """And one of fp8's, of which vLLM reads whole linears alone."""
    for method, entry in (
        ("modelopt fp8, in a file", "model.layers.4* in exclude_modules matches no module"),
        ("fp8", "model.layers.4 in modules_to_not_convert, like 1 more, matches no module"),
    ):
        _unlisted(method).save(tmp_path / method)
        _, items = verified(tmp_path / method)
        assert f"leaves them out nowhere ({entry} of it)" in items[ITEM]["cause"]


def test_a_list_that_is_not_there_has_no_idle_entry(tmp_path: Path) -> None:
    checkpoint = foreign_sources.quantized(GLM, "awq, experts alone", "quantized")
    checkpoint.quantization.pop("modules_to_not_convert", None)
    checkpoint.save(tmp_path / "checkpoint")
    _, items = verified(tmp_path / "checkpoint")
    assert OF_VLLM in items and not any(name.startswith("internal") for name in items)


def _left_out(checkpoint: Checkpoint, *modules: str) -> Checkpoint:
    """Leave modules out as the checkpoint's method does."""
    own = {"quant_method": "modelopt", **checkpoint.quantization}
    leave_out = METHODS_READ[method_of(own)].leave_out
    assert leave_out is not None
    lists = leave_out(own, modules)
    if checkpoint.config_file is not None:
        checkpoint.quantization["exclude_modules"] = lists["ignore"]
    else:
        checkpoint.config["quantization_config"] = lists
    return checkpoint


def _unlisted(method: str) -> Checkpoint:
    """The MTP layer is stored unquantized, and another one is listed."""
    return _left_out(foreign_sources.quantized(GLM, method, "unquantized"), "model.layers.4")


def _but_one(method: str) -> Checkpoint:
    checkpoint = foreign_sources.quantized(GLM, method, "unquantized")
    modules = foreign_sources.modules(checkpoint)
    return _left_out(checkpoint, *(one for one in modules if "o_proj" not in one))


def _listed_twice(method: str) -> Checkpoint:
    """The MTP layer is quantized, and listed as a whole and by its linears."""
    checkpoint = foreign_sources.quantized(GLM, method, "quantized")
    modules = foreign_sources.modules(foreign_sources.quantized(GLM, method, "unquantized"))
    return _left_out(checkpoint, "model.layers.3", "model.decoder", *modules)


def _experts_alone(method: str) -> Checkpoint:
    """The whole MTP layer is listed, and its experts alone are stored unquantized."""
    checkpoint = foreign_sources.quantized(GLM, method, "quantized")
    plain = foreign_sources.quantized(GLM, method, "unquantized").tensors
    experts = f"{GLM_MTP}mlp.experts."
    kept = {name: one for name, one in checkpoint.tensors.items() if not name.startswith(experts)}
    checkpoint.tensors = kept | {n: one for n, one in plain.items() if n.startswith(experts)}
    return _left_out(checkpoint, "model.layers.3", "model.decoder")


def _main_too(method: str) -> Checkpoint:
    checkpoint = foreign_sources.quantized(GLM, method, "quantized")
    layers = (f"model.layers.{layer}.self_attn" for layer in range(4))
    return _left_out(checkpoint, *layers, "model.decoder.self_attn")


DAMAGES = (_unlisted, _but_one, _listed_twice, _experts_alone, _main_too)
SHORT = {("compressed-tensors, int4", _experts_alone), ("auto-round", _listed_twice)} | {
    *(("gptq", _main_too), ("fp8", _but_one), ("awq, experts alone", _unlisted)),
    ("modelopt fp8, in a file", _experts_alone),
}


@pytest.mark.parametrize(
    ("method", "damage"),
    [
        pytest.param(
            *(method, damage), marks=[] if (method, damage) in SHORT else [pytest.mark.nightly]
        )
        for method in METHODS
        for damage in DAMAGES
    ],
)
def test_the_lists_that_are_advised_mend_it_for_every_engine(
    method: str, damage: Callable[[str], Checkpoint], tmp_path: Path
) -> None:
    """Written as they are said, level files passes, but where an engine reads no such draft."""
    damage(method).save(tmp_path / "checkpoint")
    _, items = verified(tmp_path / "checkpoint")
    failed = [item for item in items.values() if item["status"] == "fail"]
    mended = [item for item in failed if "lists" in item["data"]]
    assert all("graft" not in item["repair"] for item in mended)
    if not mended:
        assert all(any(words in one["cause"] for words in UNREAD) for one in failed)
        return
    file = mended[0]["data"]["corrected"].split()[-1]

    def write(fields: Config) -> None:
        own = fields.get("quantization") or fields["quantization_config"]
        own |= mended[0]["data"]["lists"]

    edit_json(tmp_path / "checkpoint" / file, write)
    _, items = verified(tmp_path / "checkpoint")
    assert all(any(words in items[one]["cause"] for words in UNREAD) for one in failures(items))


# What no list mends for SGLang.
UNREAD = ("SGLang builds every expert of a GPTQ", "SGLang builds every draft unquantized beside")


def test_a_projection_beside_the_layers_is_added_at_once(tmp_path: Path) -> None:
    """Which vLLM builds as any linear."""
    source = FIXTURES / "qwen3-5-tiny"
    method = METHODS["compressed-tensors, int8"]

    def config(fields: Config) -> None:
        fields["quantization_config"] = method.config

    def codes(stored: Tensors) -> Tensors:
        found: Tensors = {}
        for name, one in stored.items():
            if LINEAR.match(name) and not name.startswith("mtp."):
                parts, _ = method.encode(one.float())
                found |= {f"{name.removesuffix('.weight')}.{key}": x for key, x in parts.items()}
            else:
                found[name] = one
        return found

    _, items = verified(rewritten(source, tmp_path / "beside", codes, config))
    assert items[ITEM]["status"] == "fail" and "graft" not in items[ITEM]["repair"]
    lists = items[ITEM]["data"]["lists"]["ignore"]
    assert {r"re:mtp.fc(\..*)?$", r"re:mtp.layers.0(\..*)?$"} <= {*lists}


def test_what_no_engine_was_tried_with_fails_for_none(tmp_path: Path) -> None:
    method = "compressed-tensors, zero points"
    folder = quantized(GLM, tmp_path / "main", method, mtp_left_out)
    outcome, items = verified(folder, "--engine", "vllm")
    assert (outcome.code, items[OF_VLLM]["status"]) == (0, "not tested"), outcome.err
    assert "was not tried" in items[OF_VLLM]["cause"]


def listed_as(*entries: str) -> Callable[[Config], None]:
    return lambda fields: fields["quantization_config"].update(ignore=["lm_head", *entries])


def test_what_every_engine_lacks_is_named_at_once(tmp_path: Path) -> None:
    """Entries that name a router are none that act on nothing."""
    listed = listed_as("model.layers.3.mlp.gate")
    folder = quantized(GLM, tmp_path / "lacks", "compressed-tensors, int4", listed)
    _, items = verified(folder)
    cause = items[ITEM]["cause"]
    entries = re.findall(r"add (\S+), (\S+) to ignore", cause)[0]
    assert entries == (r"re:model.layers.3(\..*)?$", r"re:model.decoder(\..*)?$")
    assert "SGLang's name of the draft's layer" in cause and "matches no module" not in cause
    assert cause == items[ITEM]["data"]["problems"][0]["words"]  # which are printed
    _, items = verified(folder, "--engine", "vllm")
    assert "SGLang" not in items[ITEM]["cause"]
    listed = listed_as("model.layers.3.mlp.gate", *entries)
    mended = quantized(GLM, tmp_path / "mended", "compressed-tensors, int4", listed)
    assert verified(mended)[0].code == 0


GATES = ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b")
# The key to add to, and the entry, of an unquantized MTP layer whose linears vLLM finds itself.
EXPERTS_LACK = {
    "awq": "model.layers.3, model.decoder to modules_to_not_convert",
    "gptq": r"-:model\.layers\.3(\..*)?$ to dynamic",
}


@pytest.mark.parametrize("method", EXPERTS_LACK)
def test_vllm_finds_linears_by_their_tensors_and_no_experts(tmp_path: Path, method: str) -> None:
    folder = quantized(GLM, tmp_path / "main", method)
    outcome, items = verified(folder)
    assert (outcome.code, failures(items)) == (7, {ITEM})
    assert "24 matrices of the MTP module" in items[ITEM]["cause"]
    assert f"add {EXPERTS_LACK[method]}" in items[ITEM]["cause"]


ENGINES = {
    "vllm": ("awq", mtp_left_out, "sglang"),
    "sglang": ("compressed-tensors, int4", listed_as(r"re:.*decoder\..*"), "vllm"),
}


@pytest.mark.parametrize("engine", ENGINES)
def test_the_verdict_names_the_engine_that_reads_it(tmp_path: Path, engine: str) -> None:
    method, config, other = ENGINES[engine]
    folder = quantized(GLM, tmp_path / "main", method, config)
    outcome, items = verified(folder)
    titles = {"vllm": "vLLM", "sglang": "SGLang"}
    assert (outcome.code, failures(items)) == (7, {f"mtp: precision as {titles[other]} reads it"})
    assert json.loads(outcome.out)["engines"] == {engine: True, other: False}
    found = "no fault in headers and configs"
    alone = f". --engine {engine} judges it for {titles[engine]} alone: {found}"
    assert f"Do not ship this checkpoint for {titles[other]}; " in outcome.err
    assert outcome.err.endswith(f"{alone}.\n")
    page = run_program("verify", folder, "--level", "files")
    assert f"FAILED for {titles[other]}{alone} files" in " ".join(page.out.split())
    judged, items = verified(folder, "--engine", engine)
    assert (judged.code, failures(items)) == (0, set())
    left = items[f"mtp: precision as {titles[other]} reads it"]
    assert (left["status"], left["cause"]) == ("not tested", f"--engine {engine} leaves it out")
    assert verified(folder, "--engine", other)[0].code == 7


def test_an_engine_that_is_asked_for_and_refuses_a_config_fails(tmp_path: Path) -> None:
    folder = quantized(GLM, tmp_path / "main", "gptq, asymmetric", mtp_left_out)
    outcome, items = verified(folder)
    assert (outcome.code, items[OF_VLLM]["status"]) == (0, "not tested")
    alone, found = verified(folder, "--engine", "vllm")
    assert (alone.code, failures(found)) == (7, {OF_VLLM})
    assert "does not load a checkpoint" in found[OF_VLLM]["cause"]


def test_no_engine_is_named_where_none_reads_it(tmp_path: Path) -> None:
    outcome, _ = verified(quantized(GLM, tmp_path / "main", "fp8"))
    assert "Do not ship this checkpoint; " in outcome.err


def test_what_a_config_misdescribes_is_said_once(tmp_path: Path) -> None:
    folder = quantized(GLM, tmp_path / "main", "compressed-tensors, int4")
    outcome = run_program("verify", folder, "--json", "--quiet")
    checks = json.loads(outcome.out)["checks"]
    failed = [
        item["name"] for check in checks for item in check["items"] if item["status"] == "fail"
    ]
    assert (outcome.code, failed) == (7, [ITEM])


LISTED = ("awq", "gptq", "auto-round", "compressed-tensors, int4", "fp8", "modelopt nvfp4")


@pytest.mark.parametrize("method", LISTED)
def test_a_module_that_is_left_out_as_it_is_stored_passes(tmp_path: Path, method: str) -> None:
    outcome, items = verified(quantized(GLM, tmp_path / "main", method, mtp_left_out))
    assert failures(items) <= {"mtp: precision as SGLang reads it"}, outcome.err
    assert items[ITEM]["status"] == "pass"


def test_sglang_builds_a_draft_beside_nvfp4_unquantized(tmp_path: Path) -> None:
    _, items = verified(quantized(GLM, tmp_path / "main", "modelopt nvfp4", mtp_left_out))
    assert items[OF_SGLANG]["status"] == "pass"
    foreign_sources.quantized(GLM, "modelopt nvfp4", "quantized").save(tmp_path / "both")
    _, items = verified(tmp_path / "both")
    assert failures(items) == {OF_SGLANG}
    assert "unquantized beside a main model in nvfp4: 27 matrices" in items[OF_SGLANG]["cause"]
    assert "no quantization_config" not in items[OF_SGLANG]["cause"]


def test_what_sglang_lacks_has_its_name_of_the_layer(tmp_path: Path) -> None:
    """Where it renames no list: with the entries that it lacks the checkpoint passes."""
    folder = quantized(GLM, tmp_path / "main", "awq", mtp_left_out)
    edit_json(folder / "config.json", lambda config: _listed(config).append("model.decoder.self"))
    _, items = verified(folder)
    assert failures(items) == {OF_SGLANG}
    (added,) = re.findall("add (.*) to modules_to_not_convert", items[OF_SGLANG]["cause"])
    assert added == "model.decoder"
    edit_json(folder / "config.json", lambda config: _listed(config).extend(added.split(", ")))
    assert failures(verified(folder)[1]) == set()


def _listed(config: Config) -> list[str]:
    names: list[str] = config["quantization_config"]["modules_to_not_convert"]
    return names


@pytest.mark.parametrize("packed", [True, False])
def test_a_module_in_bitsandbytes_or_beside_it_passes(tmp_path: Path, packed: bool) -> None:
    """Its scales are named otherwise than others', and no engine builds a router quantized."""
    found = foreign_sources.shortened(DEEPSEEK, 4)
    linears, stored = foreign_sources.modules(found), unquantized(found.tensors)
    own = [f"{name}.weight" for name in linears]
    found.tensors = {name: one.bfloat16() for name, one in stored.items()}
    for name in filter(LINEAR.match, stored):
        if packed or name not in own:
            parts = nf4(found.tensors.pop(name)).items()
            found.tensors |= {name.removesuffix("weight") + last: one for last, one in parts}
    skipped = ["lm_head", *(re.sub(r"model\.layers\.4", "model.decoder", name) for name in linears)]
    found.config["quantization_config"] = {
        **BITSANDBYTES_NF4,
        "llm_int8_skip_modules": ["lm_head"] if packed else [*skipped, *linears],
    }
    found.save(tmp_path / "checkpoint")
    outcome, items = verified(tmp_path / "checkpoint")
    assert (outcome.code, failures(items)) == (0, set()), outcome.err


def test_a_projection_that_no_list_names_is_fine_unless_it_is_quantized(tmp_path: Path) -> None:
    everything = quantized(GLM, tmp_path / "source", "compressed-tensors, fp8")

    def quantized_too(stored: Tensors) -> None:
        """fp8 by channels for the MTP layer's linears, eh_proj as it is."""
        for name in [n for n in stored if n.startswith(GLM_MTP) and LINEAR.match(n)]:
            weight = stored[name].float()
            scale = weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-6) / 448
            stored[name] = (weight / scale).to(torch.float8_e4m3fn)
            stored[f"{name}_scale"] = scale

    def projection_too(stored: Tensors) -> None:
        quantized_too(stored)
        name = f"{GLM_MTP}eh_proj.weight"
        stored[name] = stored[name].to(torch.float8_e4m3fn)
        stored[f"{name}_scale"] = torch.ones(stored[name].shape[0], 1)

    outcome, items = verified(rewritten(everything, tmp_path / "fine", quantized_too))
    assert (outcome.code, failures(items)) == (0, set()), outcome.err
    outcome, items = verified(rewritten(everything, tmp_path / "all", projection_too))
    assert outcome.code == 7
    assert "eh_proj is stored quantized" in items[ITEM]["cause"]


def test_the_entry_that_is_too_many_is_named(tmp_path: Path) -> None:
    def quantize(fields: Config) -> None:
        fields["quantization_config"] = METHODS["fp8"].config | {
            "modules_to_not_convert": ["lm_head", "model.layers.3.mlp.experts", "shared_head"]
        }

    source = quantized(GLM, tmp_path / "source", "fp8")

    def renamed(stored: Tensors) -> Tensors:
        """Main layer 2 in the place of the MTP layer's own linears."""
        main = "model.layers.2."
        return stored | {
            name.replace(main, GLM_MTP): tensor.clone()
            for name, tensor in stored.items()
            if name.startswith(main)
        }

    folder = rewritten(source, tmp_path / "many", renamed, quantize)
    outcome, items = verified(folder)
    assert (outcome.code, failures(items)) == (7, {OF_VLLM})
    assert "stored quantized" in items[OF_VLLM]["cause"]
    entry = "model.layers.3.mlp.experts in modules_to_not_convert"
    assert f"({entry})" in items[OF_VLLM]["cause"]


def test_a_list_of_hundreds_of_entries_is_read_once_for_all_modules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each entry alone, and the config without the one to blame."""
    config = read_json(GLM / "config.json")
    method = METHODS["compressed-tensors, int4"].config
    others = [f"model.layers.{layer}.mlp.up_proj" for layer in range(4, 504)]
    entry = r"re:.*layers\.3\..*"
    quantization = method | {"ignore": [*others, entry]}
    stored = stored_model(config | {"quantization_config": quantization}).mtp
    read: list[object] = []

    def counting(one: object) -> QuantConfig:
        read.append(one)
        return quant_config_of(one)

    monkeypatch.setattr(list_entries, "quant_config_of", counting)
    draft = ListedDraft(stored, {}, quantization, ("model.layers.3",))
    linears = [one for one in stored.weights.values() if one.weight.is_linear_weight]
    assert len(linears) > 20
    assert {draft._to_blame(one) for one in linears} == {f"{entry} in ignore"}
    assert len(read) == len(others) + 4  # with, without the list, and without the one
    both = method | {"ignore": [entry, "re:.*3.*", "lm_head"]}
    words = f"{entry} in ignore and re:.*3.* in ignore"
    assert ListedDraft(stored, {}, both, ())._to_blame(linears[0]) == words


def test_experts_that_are_listed_one_by_one_are_named(tmp_path: Path) -> None:
    """vLLM asks AutoRound's extra_config for all experts of a layer by one name."""
    listed("auto-round")().save(tmp_path / "checkpoint")
    _, items = verified(tmp_path / "checkpoint")
    cause = items[OF_VLLM]["cause"]
    assert "24 matrices" in cause
    assert "down_proj in extra_config" in cause and "acts on nothing: all experts" in cause


BLAMED: dict[str, tuple[str, dict[str, Any], str]] = {
    "blocks": (
        "auto-round",
        {"block_name_to_quantize": "model.layers.0,model.layers.1,model.layers.2"},
        r"\(model.layers.0,model.layers.1,model.layers.2 in block_name_to_quantize\), so that they"
        r" are built unquantized: take \S+ out of block_name_to_quantize",
    ),
    "targets": (
        "compressed-tensors, int4",
        {"targets": [r"re:.*layers\.[0-2]\..*_proj$"]},
        r"\(no target of config_groups is for them\), so that they are built unquantized$",
    ),
}


@pytest.mark.parametrize("case", BLAMED)
def test_what_names_other_modules_alone_is_blamed(tmp_path: Path, case: str) -> None:
    method, change, words = BLAMED[case]
    checkpoint = foreign_sources.quantized(GLM, method, "quantized")
    fields = checkpoint.quantization
    (fields["config_groups"]["group_0"] if case == "targets" else fields).update(change)
    checkpoint.save(tmp_path / "checkpoint")
    outcome, items = verified(tmp_path / "checkpoint")
    assert outcome.code == 7
    item = next(item for item in items.values() if item["status"] == "fail")
    assert re.search(words, item["cause"]), item["cause"]


def test_a_list_that_leaves_a_module_in_bitsandbytes_out_is_told_once(tmp_path: Path) -> None:
    """And not by its constants, which have names below the weight's."""
    found = foreign_sources.shortened(DEEPSEEK, 4)
    found.tensors = {name: one.bfloat16() for name, one in unquantized(found.tensors).items()}
    for name in [name for name in found.tensors if LINEAR.match(name)]:
        parts = nf4(found.tensors.pop(name)).items()
        found.tensors |= {name.removesuffix("weight") + last: one for last, one in parts}
    skipped = ["lm_head", "model.layers.4", "model.decoder"]
    found.config["quantization_config"] = {**BITSANDBYTES_NF4, "llm_int8_skip_modules": skipped}
    found.save(tmp_path / "checkpoint")
    _, items = verified(tmp_path / "checkpoint")
    assert ITEM in failures(items) and "mtp: tensors" not in failures(items)
    assert "(model.layers.4 in llm_int8_skip_modules)" in items[ITEM]["cause"]


def test_codes_that_were_cast_beside_any_scale_are_named(tmp_path: Path) -> None:
    checkpoint = foreign_sources.quantized(GLM, "compressed-tensors, fp8", "quantized")
    for name, one in checkpoint.mtp().items():
        checkpoint.tensors[name] = one.bfloat16() if one.dtype is torch.float8_e4m3fn else one
    checkpoint.save(tmp_path / "checkpoint")
    _, items = verified(tmp_path / "checkpoint")
    cause = items["MTP modules complete"]["cause"]
    assert "down_proj.weight is BF16, and its weight_scale is beside it: codes were cast" in cause


def test_fused_experts_are_listed_by_one_name(tmp_path: Path) -> None:
    """As engines ask AutoRound's extra_config for them."""
    config = family_config("hy_v4")
    specs = family_of(config).tensors.values()
    linears = [spec for spec in specs if spec.is_linear_or_projection]
    packed = [s.name for s in linears if s.name.endswith("layers.0.mlp.down_proj.weight")]
    assert packed

    def change(stored: Tensors) -> None:
        for name in packed:
            parts, _ = METHODS["auto-round"].encode(stored.pop(name).float())
            for last, one in parts.items():
                stored[name.removesuffix("weight") + last] = one.contiguous()

    plain = {spec.module for spec in linears if spec.name not in packed}
    fused = {s.name.rpartition(".")[0] for s in specs if s.name.endswith("experts.down_proj")}
    assert any("mtp" in name for name in fused)
    extra = dict.fromkeys(sorted(plain | fused), {"bits": 16, "data_type": "float"})
    method = METHODS["auto-round"].config
    own = {**method, "extra_config": extra, "block_name_to_quantize": None}
    folder = write_dense(tmp_path / "dense", config=config)
    (folder / INDEX).unlink()
    changed = rewritten(folder, tmp_path / "a", change, lambda c: c.update(quantization_config=own))
    _, items = verified(changed)
    assert failures(items) == {OF_SGLANG}  # which has another name for the layer
    assert items[OF_VLLM]["status"] == "pass"
    assert "knows the draft's layer as .model.decoder" in items[OF_SGLANG]["cause"]


def test_a_pattern_of_all_experts_is_no_single_one() -> None:
    lists = [[f"re:mtp.0.experts.{last}"] for last in ("*", "0.up_proj")]
    words = [not_left_out("quantization_config", 1, "m", "the MTP module", one) for one in lists]
    assert ["all experts of a layer are one" in one for one in words] == [False, True]


@pytest.mark.parametrize("listed_too", [(), ("in_proj_a", "in_proj_b")], ids=["all", "less gates"])
@pytest.mark.parametrize("projection", [False, True])
def test_every_linear_of_transformers_may_be_in_bitsandbytes_codes(
    listed_too: tuple[str, ...], projection: bool, tmp_path: Path
) -> None:
    """Gates of a delta net too, which no other method packs; the module's projection is none that
    SGLang reads so."""

    def change(stored: Tensors) -> Tensors:
        made: Tensors = {}
        for name, one in stored.items():
            module = name.removesuffix(".weight")
            is_linear = (
                ".layers." in name and module.endswith(("_proj", *GATES)) and "mtp" not in name
            )
            if (is_linear and not module.endswith(listed_too or ("?",))) or (
                projection and "mtp.fc" in name
            ):
                made |= {f"{module}.{last}": part for last, part in nf4(one).items()}
            else:
                made[name] = one
        return made

    def config(fields: Config) -> None:
        skipped = ["lm_head", "mtp.layers", *(() if projection else ("mtp",)), *listed_too]
        fields["quantization_config"] = BITSANDBYTES_NF4 | {"llm_int8_skip_modules": skipped}

    folder = rewritten(FIXTURES / "qwen3-5-tiny", tmp_path / "nf4", change, config=config)
    outcome, items = verified(folder)
    assert (outcome.code, failures(items)) == ((7, {OF_SGLANG}) if projection else (0, set()))
    if projection:
        assert items[OF_SGLANG]["cause"].startswith("mtp.fc is stored quantized, and SGLang builds")


def test_a_config_that_says_nothing_of_a_quantization_is_named_once(tmp_path: Path) -> None:
    checkpoint = foreign_sources.quantized(GLM, "compressed-tensors, int4", "quantized")
    del checkpoint.config["quantization_config"]
    checkpoint.save(tmp_path / "checkpoint")
    _, items = verified(tmp_path / "checkpoint")
    (name,) = failures(items)
    assert name == "quantization_config" and "graft" not in items[name].get("repair", "")
    assert "put the one back that they were quantized with" in items[name]["cause"]


def test_of_a_long_list_the_repair_is_what_to_add(tmp_path: Path) -> None:
    """In JSON, as all of it is where it is short."""
    checkpoint = foreign_sources.quantized(GLM, "compressed-tensors, int4", "unquantized")
    idle = [f"{name}.weight" for name in foreign_sources.modules(checkpoint)]
    checkpoint.quantization["ignore"] += idle
    checkpoint.save(tmp_path / "main")
    _, items = verified(tmp_path / "main")
    field, _, entries = items[ITEM]["repair"].partition(": add ")
    assert field == '"ignore"' and len(idle) > 20
    checkpoint.quantization["ignore"] += json.loads(f"[{entries}]")
    checkpoint.save(tmp_path / "mended")
    assert verified(tmp_path / "mended")[0].code == 0


def test_a_single_matrix_is_told_as_one(tmp_path: Path) -> None:
    checkpoint = foreign_sources.quantized(GLM, "compressed-tensors, int4", "quantized")
    checkpoint.quantization["ignore"] += ["model.layers.3.self_attn.o_proj"]
    checkpoint.save(tmp_path / "checkpoint")
    _, items = verified(tmp_path / "checkpoint")
    words = "model.layers.3.self_attn.o_proj, a matrix of the MTP module, is stored quantized, and"
    assert words in items[OF_VLLM]["cause"] and "leaves it out" in items[OF_VLLM]["cause"]


@pytest.mark.parametrize("mtp", ["quantized", "unquantized"])
def test_one_of_joined_linears_that_is_listed_is_mended(mtp: Any, tmp_path: Path) -> None:
    """Which no config can be followed with: taken out, or the others added."""
    checkpoint = foreign_sources.quantized(GLM, "compressed-tensors, fp8", mtp)
    checkpoint.quantization["ignore"] = [r"re:model.decoder\.", f"{GLM_MTP}self_attn.q_proj"]
    checkpoint.save(tmp_path / "checkpoint")
    _, items = verified(tmp_path / "checkpoint")
    assert "mtp: config" in failures(items)
    lists = next(item["data"]["lists"] for item in items.values() if "lists" in item["data"])
    edit_json(tmp_path / "checkpoint/config.json", lambda c: c["quantization_config"].update(lists))
    assert failures(verified(tmp_path / "checkpoint")[1]) == set()


def test_an_entry_that_sglang_renames_is_blamed_as_it_is_written(tmp_path: Path) -> None:
    checkpoint = foreign_sources.shortened(DEEPSEEK, 4)
    checkpoint.quantization["modules_to_not_convert"] = ["lm_head", "model.layers.4"]
    checkpoint.save(tmp_path / "checkpoint")
    _, items = verified(tmp_path / "checkpoint")
    assert failures(items) == {OF_SGLANG}
    cause = items[OF_SGLANG]["cause"]
    assert "(model.layers.4 in modules_to_not_convert)" in cause
    assert cause.endswith("take model.layers.4 out of modules_to_not_convert")
    assert items[OF_SGLANG]["data"]["lists"] == {"modules_to_not_convert": ["lm_head"]}


def test_entries_are_added_to_the_list_that_is_written(tmp_path: Path) -> None:
    """Of native fp8's two lists engines read the first with entries, so that one of v_proj alone
    would take the place of the other."""
    found = but_of("fp8", "v_proj")()
    quantization = found.config["quantization_config"]
    quantization["modules_to_not_convert"] = quantization.pop("ignored_layers")
    folder = tmp_path / "damaged"
    found.save(folder)
    item = verified(folder)[1]["mtp: config"]
    assert [*item["data"]["to_add"]] == ["modules_to_not_convert"]
    added = f'"{GLM_MTP}self_attn.v_proj", "model.decoder.'
    assert item["repair"].startswith(f'"modules_to_not_convert": add {added}')
