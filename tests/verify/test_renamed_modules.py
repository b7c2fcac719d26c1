"""Modules of which some tensors were renamed, and that hold a layer of another model's kind."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file

from cases import run_program
from faults.small_model import family_config, write_dense
from verify.foreign import FIXTURES, GLM_MTP, INDEX, Config, Tensors, rewritten
from verify.foreign_damages import lose, rename
from verify.foreign_folders import QWEN_NAMES
from verify.foreign_sources import GLM, ignore, quantized

QWEN = FIXTURES / "qwen3-5-tiny"
APART = "draft.safetensors"


def complete(folder: Path) -> dict[str, Any]:
    """The item that says whether the modules are complete."""
    outcome = run_program("verify", folder, "--level", "files", "--json", "--quiet")
    assert outcome.code == 7
    (files,) = (c for c in json.loads(outcome.out)["checks"] if c["name"] == "files")
    found: dict[str, Any] = {item["name"]: item for item in files["items"]}["MTP modules complete"]
    return found


def test_single_tensors_under_other_names_are_told(tmp_path: Path) -> None:
    others = {"mtp.fc.": "mtp.eh_proj.", "mtp.pre_fc_norm_hidden.": "mtp.hnorm."}

    def change(stored: Tensors) -> None:
        for own, other in others.items():
            stored[f"{other}weight"] = stored.pop(f"{own}weight")

    item = complete(rewritten(QWEN, tmp_path / "renamed", change))
    pairs = {f"{other}weight": f"{own}weight" for own, other in others.items()}
    assert "under other names (2)" in item["cause"] and item["data"]["renamed"] == pairs
    for other, own in pairs.items():
        assert f"{other} lies where engines look for {own}" in item["cause"]
    assert "mtp-export graft" in item["repair"]


@pytest.mark.parametrize("mtp", ["quantized", "unquantized"])
@pytest.mark.parametrize("method", ["auto-round", "gptq", "awq", "compressed-tensors, int4"])
def test_packed_weights_under_other_names_are_told(
    method: str, mtp: Literal["quantized", "unquantized"], tmp_path: Path
) -> None:
    """Whatever the names that lists leave out make of them."""
    checkpoint = quantized(GLM, method, mtp)
    rename(QWEN_NAMES)(checkpoint)
    checkpoint.save(tmp_path / "renamed")
    item = complete(tmp_path / "renamed")
    cause, last = item["cause"], ".weight lies where engines look for model.layers.3."
    assert "(44): 40 begin with mtp.layers.0, where engines look for model.layers.3;" in cause
    assert f"; mtp.norm{last}shared_head.norm.weight" in cause
    assert f"; mtp.fc{last}eh_proj.weight" in cause and len(item["data"]["renamed"]) == 44


def test_gate_and_up_that_are_joined_in_each_expert_are_told_as_one(tmp_path: Path) -> None:
    def change(stored: Tensors) -> None:
        for name in [n for n in stored if n.startswith("model.layers.3.") and ".gate_proj." in n]:
            up = stored.pop(name.replace("gate_proj", "up_proj"))
            stored[name.replace("gate_proj", "gate_up_proj")] = torch.cat([stored.pop(name), up])

    cause = complete(rewritten(GLM, tmp_path / "joined", change))["cause"]
    words = "joins the rows of gate_proj and up_proj, which engines look for one by one"
    assert f"model.layers.3.mlp.experts.*.gate_up_proj.weight (8) {words}" in cause
    assert f"model.layers.3.mlp.shared_experts.gate_up_proj.weight {words}" in cause


def test_names_that_lack_their_end_are_told_once(tmp_path: Path) -> None:
    """One is the beginning of the name that it should have."""

    def change(stored: Tensors) -> Tensors:
        return {
            name.removesuffix(".weight") if name.startswith(GLM_MTP) else name: one
            for name, one in stored.items()
        }

    folder = rewritten(GLM, tmp_path / "renamed", change)
    outcome = run_program("verify", folder, "--level", "files", "--quiet")
    assert outcome.code == 7 and outcome.err.count("under other names") == 1


def test_main_layers_that_a_list_leaves_out_are_no_renamed_module(tmp_path: Path) -> None:
    """Though the list is wrong and the main layers' codes are none that engines look for."""
    checkpoint = quantized(GLM, "compressed-tensors, int4", "quantized")
    ignore(checkpoint, r"re:.*layers\.\d\.mlp\.shared_experts\..*")
    lose(r"^model\.layers\.3\.mlp\.shared_experts\.")(checkpoint)
    checkpoint.save(tmp_path / "lost")
    outcome = run_program("verify", tmp_path / "lost", "--level", "files", "--quiet")
    assert outcome.code == 7 and "other names" not in outcome.err
    assert "model.layers.3.mlp.shared_experts.gate_proj.weight is missing" in outcome.err


def test_a_tower_is_no_part_of_a_renamed_module(tmp_path: Path) -> None:
    """Nor the first tensor that the sentence is about."""
    folder = write_dense(tmp_path / "omni", config=family_config("MiMoV2OmniForCausalLM"))
    (folder / INDEX).unlink(missing_ok=True)
    stored = {"audio_encoder.pos_embed.weight": torch.ones(4, 4, dtype=torch.bfloat16)}
    for shard in folder.glob("*.safetensors"):
        stored |= load_file(shard)
        shard.unlink()
    renamed = {name.replace("model.mtp.", "model.MTP."): one for name, one in stored.items()}
    save_file(renamed, folder / "model.safetensors")
    outcome = run_program("verify", folder, "--level", "files", "--quiet")
    assert outcome.code == 7 and "begin with model.MTP, where engines look for" in outcome.err
    assert "audio_encoder" not in outcome.err


def test_an_adapter_that_was_not_merged_is_told(tmp_path: Path) -> None:
    name = f"{GLM_MTP}self_attn.o_proj"

    def change(stored: Tensors) -> None:
        base = stored.pop(f"{name}.weight")
        stored[f"{name}.base_layer.weight"] = base
        stored[f"{name}.lora_A.default.weight"] = base[:8].clone()
        stored[f"{name}.lora_B.default.weight"] = base[:, :8].clone()

    cause = complete(rewritten(GLM, tmp_path / "adapter", change))["cause"]
    assert f"{name}.base_layer.weight lies where engines look for {name}.weight" in cause
    assert "either: an adapter that was not merged into the weights beside it" in cause


def test_names_of_megatron_are_told_each(tmp_path: Path) -> None:
    """The norm and the head of the module too, whose names have no word in common."""
    own = "model.layers.3."
    others = {f"{own}{one}": f"mtp.layers.0.{one}" for one in ("enorm", "hnorm", "eh_proj")} | {
        f"{own}shared_head.norm": "mtp.layers.0.final_layernorm"
    }

    def change(stored: Tensors) -> Tensors:
        inside = "mtp.layers.0.transformer_layer."
        return {
            f"{others[module]}.{last}" if module in others else name.replace(own, inside): one
            for name, one in stored.items()
            for module, _, last in [name.rpartition(".")]
        }

    item = complete(rewritten(GLM, tmp_path / "megatron", change))
    assert f"final_layernorm.weight lies where engines look for {own}shared_head" in item["cause"]
    assert "begin with mtp.layers.0.transformer_layer, where engines look for" in item["cause"]
    named = item["data"]["renamed"]
    assert len(named) == 44 and all(new.startswith("mtp.layers.0.") for new in named)


def test_names_of_transformers_in_a_module_are_told_each(tmp_path: Path) -> None:
    """A bias and a router whose beginnings others of the layer rightly have."""
    folder = write_dense(tmp_path / "hy", config=family_config("hy_v3"))
    mlp = "model.layers.3.mlp."
    others = {f"{mlp}router.gate": f"{mlp}gate", f"{mlp}expert_b": f"{mlp}e_score_correction_b"}
    others[f"{mlp}shared_mlp"] = f"{mlp}shared_experts"
    pairs = dict[str, str]()

    def rename_one(name: str) -> str:
        for own, other in others.items():
            if name.startswith(own):
                pairs[name.replace(own, other)] = name
        return next((other for other, own in pairs.items() if own == name), name)

    for shard in folder.glob("*.safetensors"):
        save_file({rename_one(n): one for n, one in load_file(shard).items()}, shard)
    index = folder / INDEX
    places = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": {rename_one(n): f for n, f in places.items()}}))
    item = complete(folder)
    assert item["data"]["renamed"] == pairs and len(pairs) == 5
    assert f"(5): 3 begin with {mlp}shared_experts, where engines look for" in item["cause"]
    last = "lies where engines look for"
    assert f"{mlp}e_score_correction_bias {last} {mlp}expert_bias" in item["cause"]
    assert f"{mlp}gate.weight {last} {mlp}router.gate.weight" in item["cause"]


def test_rows_that_a_trainer_joins_are_no_other_models(tmp_path: Path) -> None:
    def change(stored: Tensors) -> None:
        def taken(name: str) -> torch.Tensor:
            return stored.pop(f"mtp.layers.0.{name}_proj.weight")

        joined = torch.cat([taken(f"self_attn.{one}") for one in "qkv"])
        stored["mtp.layers.0.self_attn.linear_qkv.weight"] = joined
        joined = torch.cat([taken("mlp.gate"), taken("mlp.up")])
        stored["mtp.layers.0.mlp.linear_fc1.weight"] = joined

    cause = complete(rewritten(QWEN, tmp_path / "joined", change))["cause"]
    assert "linear_qkv.weight joins the rows of q_proj, k_proj and v_proj, which" in cause
    assert "linear_fc1.weight joins the rows of gate_proj and up_proj, which engines" in cause
    assert "another model's" not in cause


@pytest.mark.parametrize("case", ["rows", "columns"])
def test_parts_of_a_tensor_that_engines_look_for_as_one_are_told(tmp_path: Path, case: str) -> None:
    model_type, whole, own, axis = {
        "rows": ("glm_ocr", "layers.3.mlp.gate_up_proj", ("gate_proj", "up_proj"), 0),
        "columns": ("hy_v3", "layers.3.eh_proj", ("e_proj", "h_proj"), 1),
    }[case]
    folder = write_dense(tmp_path / "source", config=family_config(model_type))

    def change(stored: Tensors) -> None:
        (name,) = (name for name in stored if name.endswith(f"{whole}.weight"))
        parts = stored.pop(name).chunk(2, axis)
        before = name.removesuffix(f"{whole.rpartition('.')[2]}.weight")
        for last, part in zip(own, parts, strict=True):
            stored[f"{before}{last}.weight"] = part.contiguous()

    (folder / INDEX).unlink()
    cause = complete(rewritten(folder, tmp_path / "parted", change))["cause"]
    assert re.search(rf"{own[0]}.weight, .*{own[1]}.weight are parts of .*{whole}.weight", cause)


def test_experts_in_a_dense_model_are_another_models(tmp_path: Path) -> None:
    def change(stored: Tensors) -> None:
        mlp = "mtp.layers.0.mlp."
        for name in ("gate", "up", "down"):
            del stored[f"{mlp}{name}_proj.weight"]
            stored[f"{mlp}shared_expert.{name}_proj.weight"] = torch.ones(64, 64).bfloat16()
        stored[f"{mlp}gate.weight"] = torch.ones(8, 128).bfloat16()

    item = complete(rewritten(QWEN, tmp_path / "another", change))
    assert "mtp.layers.0.mlp is of another kind than config.json says" in item["cause"]
    assert "it has gate, shared_expert, and lacks down_proj, gate_proj, up_proj" in item["cause"]
    assert "under other names" not in item["cause"]


def test_a_module_of_a_wider_model_is_named(tmp_path: Path) -> None:
    def change(stored: Tensors) -> None:
        for name, one in stored.items():
            if name.startswith("mtp.") and 128 in one.shape:
                stored[name] = torch.ones([160 if n == 128 else n for n in one.shape]).bfloat16()

    item = complete(rewritten(QWEN, tmp_path / "wider", change))
    assert "hidden states of 160 channels" in item["cause"] and "have 128" in item["cause"]
    assert item["cause"].startswith("mtp.") and "norm" in item["cause"].partition(" ")[0]
    assert "the module is another model's" in item["cause"]


def test_a_component_more_in_names_is_named(tmp_path: Path) -> None:
    """As adapters leave it in the names of the linears that they are put on."""

    def change(stored: Tensors) -> Tensors:
        inside = {n: n.replace("_proj.w", "_proj.base_layer.w") for n in stored if "mtp." in n}
        return {inside.get(name, name): one for name, one in stored.items()}

    cause = complete(rewritten(QWEN, tmp_path / "inside", change))["cause"]
    assert "(7): 7 have base_layer in them, such as mtp.layers.0.mlp.down_proj.base_lay" in cause
    assert "where engines look for mtp.layers.0.mlp.down_proj.weight, without it. Rename" in cause


def test_what_follows_from_other_names_is_not_told_again(tmp_path: Path) -> None:
    """Neither what is missing and strange by config.json, nor what engines read."""

    def change(stored: Tensors) -> Tensors:
        return {name.replace("mtp.", "model.mtp."): one for name, one in stored.items()}

    outcome = run_program("verify", rewritten(QWEN, tmp_path / "other", change), "--level", "files")
    assert outcome.code == 7
    told = "engines look for them without model. before each. Rename them so, with their scales"
    assert " ".join(outcome.out.split()).count(told) == 1
    assert "is missing" not in outcome.out and "is not a tensor" not in outcome.out


@pytest.mark.parametrize("before", ["module.", "language_model."])
def test_a_model_whose_names_all_begin_otherwise_is_told_once(before: str, tmp_path: Path) -> None:
    """As where a wrapper of the whole model was saved; by some of them the module is found."""

    def change(stored: Tensors) -> Tensors:
        return {f"{before}{name}": one for name, one in stored.items()}

    outcome = run_program("verify", rewritten(GLM, tmp_path / "all", change), "--level", "files")
    text = " ".join(outcome.out.split())
    assert outcome.code == 7
    told = "of the model are there under other names (141): engines look for them without"
    assert text.count(f"{told} {before} before each") == 1
    assert "is missing" not in text and "is not a tensor" not in text and "graft" not in text


def test_a_model_whose_layers_are_counted_from_one(tmp_path: Path) -> None:
    """No main layer is lost: each lies where the next one should."""

    def change(stored: Tensors) -> Tensors:
        number = re.compile(r"(?<=layers\.)\d+")
        return {number.sub(lambda own: f"{int(own[0]) + 1}", n): one for n, one in stored.items()}

    outcome = run_program("verify", rewritten(GLM, tmp_path / "one", change), "--level", "files")
    text = " ".join(outcome.out.split())
    assert outcome.code == 7
    assert "layers have numbers that are too high by 1, from model.layers.1, where engines" in text
    assert "to model.layers.4, where they look for model.layers.3. Rename" in text
    assert "is missing" not in text and "nothing is there" not in text and "graft" not in text


def test_a_bias_under_another_name_is_told_once(tmp_path: Path) -> None:
    """And not as a scale of the weight beside it."""

    def change(stored: Tensors) -> Tensors:
        end = "3.mlp.gate.e_score_correction_bias"
        return {n.replace(end, "3.mlp.gate.expert_bias"): one for n, one in stored.items()}

    outcome = run_program("verify", rewritten(GLM, tmp_path / "bias", change), "--level", "files")
    text = " ".join(outcome.out.split())
    assert outcome.code == 7 and "(1): model.layers.3.mlp.gate.expert_bias lies where" in text
    assert "is stored as" not in text and "not a tensor of" not in text


@pytest.mark.parametrize("fused", [False, True])
def test_experts_of_another_form_are_told_once(fused: bool, tmp_path: Path) -> None:
    """Counted from one, or in one tensor, and not what is missing and strange by that too."""
    experts = "model.layers.3.mlp.experts."

    def change(stored: Tensors) -> Tensors:
        if fused:
            for one in ("gate", "up", "down"):
                own = [stored.pop(f"{experts}{n}.{one}_proj.weight") for n in range(8)]
                stored[f"{experts}{one}_proj"] = torch.stack(own)
            both = [stored.pop(f"{experts}{one}_proj") for one in ("gate", "up")]
            stored[f"{experts}gate_up_proj"] = torch.cat(both, 1)
        pattern = re.compile(re.escape(experts) + r"(\d)")
        return {
            pattern.sub(lambda own: f"{experts}{int(own[1]) + 1}", name): one
            for name, one in stored.items()
        }

    outcome = run_program("verify", rewritten(GLM, tmp_path / "form", change), "--level", "files")
    text = " ".join(outcome.out.split())
    told = "holds all experts in one tensor" if fused else "counts its experts from 1 to 8, and"
    assert outcome.code == 7 and text.count(told) == 1
    assert "is missing" not in text and "is not a tensor" not in text


@pytest.mark.parametrize("count", [2, 3])
def test_of_modules_that_are_not_there_the_count_may_be_what_is_wrong(
    count: int, tmp_path: Path
) -> None:
    def change(config: Config) -> None:
        config["num_nextn_predict_layers"] = count

    outcome = run_program(
        "verify", rewritten(GLM, tmp_path / "more", config=change), "--level", "files"
    )
    missing = "model.layers.4 is" if count == 2 else "model.layers.4, model.layers.5 are"
    text = " ".join(outcome.out.split())
    assert outcome.code == 7 and f"({missing} missing)" in text and "--mtp ORIGINAL" in text
    assert "or config.json counts too many, and num_nextn_predict_layers is to be 1" in text


def test_what_follows_from_another_models_shapes_is_not_told_again(tmp_path: Path) -> None:
    """Nor norms that the other model lacks."""

    def change(stored: Tensors) -> Tensors:
        kept = {n: one for n, one in stored.items() if not (GLM_MTP in n and "k_norm" in n)}
        for name, one in kept.items():
            if name.startswith(f"{GLM_MTP}mlp.experts."):
                kept[name] = torch.cat([one, one])
        return kept

    outcome = run_program("verify", rewritten(GLM, tmp_path / "wide", change), "--level", "files")
    text = " ".join(outcome.out.split())
    assert outcome.code == 7 and "24 tensors have other shapes than config.json says" in text
    assert "is missing" not in text and "holds weight" not in text


@pytest.mark.parametrize("keys", ["module", "both"])
def test_a_module_with_more_heads_is_another_models(keys: str, tmp_path: Path) -> None:
    """Unless the main model has as many too, and config.json says fewer."""

    def change(stored: Tensors) -> None:
        for name, one in stored.items():
            if name.startswith("mtp." if keys == "module" else "") and "self_attn.k_proj" in name:
                stored[name] = torch.cat([one, one])
            if name == "mtp.layers.0.self_attn.v_proj.weight":
                stored[name] = torch.cat([one, one])

    folder = rewritten(QWEN, tmp_path / "heads", change)
    outcome = run_program("verify", folder, "--level", "files", "--quiet")
    assert outcome.code == 7
    told = "it is another model's layer: 2 tensors have other shapes"
    assert outcome.err.count(told) == (keys == "module")
    assert ("expected weight" in outcome.err) == (keys == "both")


@pytest.mark.parametrize("model_type", ["qwen3_5_moe", "qwen3_5_moe_text"])
def test_a_module_of_a_model_of_more_experts_is_named(model_type: str, tmp_path: Path) -> None:
    """Whatever config.json calls their number, and wherever it says it."""
    folder = write_dense(tmp_path / "more", config=family_config(model_type))
    (shard,) = (path for path in folder.glob("*.safetensors") if "mtp.fc.weight" in load_file(path))
    stored = load_file(shard)
    for name, one in list(stored.items()):
        if ".experts." in name and name.startswith("mtp."):
            first, number, last = name.partition("experts.")[0], *name.split(".")[5:7]
            stored[f"{first}experts.{int(number) + 8}.{last}.weight"] = one.clone()
    gate = "mtp.layers.0.mlp.gate.weight"
    stored[gate] = torch.cat([stored[gate], stored[gate].flip(0)])
    save_file(stored, shard)
    index = folder / INDEX
    places = json.loads(index.read_text())["weight_map"] | dict.fromkeys(stored, shard.name)
    index.write_text(json.dumps({"weight_map": places}))
    outcome = run_program("verify", folder, "--level", "files", "--json", "--quiet")
    (files,) = (c for c in json.loads(outcome.out)["checks"] if c["name"] == "files")
    item = {item["name"]: item for item in files["items"]}["mtp: experts"]
    assert (outcome.code, item["status"]) == (7, "fail")
    assert "num_experts 8, and every layer of mtp has 16 experts, those of main 8" in item["cause"]
    assert "one is another model's" in item["cause"]


def test_a_module_under_other_names_in_a_file_that_the_index_leaves_out(tmp_path: Path) -> None:
    """Of which no name begins as the index's do."""
    folder = shutil.copytree(GLM, tmp_path / "apart")
    index = json.loads((folder / INDEX).read_text())
    mtp: Tensors = {}
    for file in {*index["weight_map"].values()}:
        stored = load_file(folder / file)
        mtp |= {name: stored.pop(name) for name in [*stored] if name.startswith(GLM_MTP)}
        save_file(stored, folder / file, {"format": "pt"})
    index["weight_map"] = {n: f for n, f in index["weight_map"].items() if n not in mtp}
    (folder / INDEX).write_text(json.dumps(index))
    save_file({n.replace(GLM_MTP, "draft."): one for n, one in mtp.items()}, folder / APART)
    outcome = run_program("verify", folder, "--level", "files")
    text = " ".join(outcome.out.split())
    assert outcome.code == 7
    assert "(44): 44 begin with draft, where engines look for model.layers.3." in text
    assert f"They lie in {APART}, which the index does not name" in text


def test_a_file_of_something_else_is_a_remark(tmp_path: Path) -> None:
    folder = shutil.copytree(GLM, tmp_path / "adapter")
    save_file({"base_model.q.lora_A.weight": torch.ones(2, 2)}, folder / APART)
    outcome = run_program("verify", folder, "--level", "files", "--json", "--quiet")
    assert outcome.code == 0, outcome.out
    (files,) = (c for c in json.loads(outcome.out)["checks"] if c["name"] == "files")
    item = {item["name"]: item for item in files["items"]}[APART]
    assert item["figure"].startswith("1 tensor, such as base_model.q.lora_A.weight, none named")
    shown = run_program("inspect", folder)
    assert f"Passed over: {APART}, which the index does not name" in " ".join(shown.out.split())
