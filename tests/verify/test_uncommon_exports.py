"""Checkpoints as trainers, engines and scripts write them: names, places and shapes are told."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from cases import edit_json, run_program
from faults.small_model import family_config, write_dense
from mtp_checkpoints.dtypes import DType
from mtp_checkpoints.families.base import Role
from mtp_checkpoints.families.other_names import other_names
from mtp_export.verify.files.main_shapes import of_other_shapes
from verify.foreign import FIXTURES, GLM, GLM_MTP, INDEX, Config, Tensors, quantized, rewritten

QWEN = FIXTURES / "qwen3-5-tiny"


def failures(folder: Path, *options: object) -> dict[str, str]:
    """The causes of the items that fail, by their names."""
    outcome = run_program("verify", folder, "--level", "files", "--json", "--quiet", *options)
    assert outcome.code == 7
    items = [item for check in json.loads(outcome.out)["checks"] for item in check["items"]]
    return {item["name"]: item["cause"] for item in items if item["status"] == "fail"}


def complete(folder: Path) -> str:
    return failures(folder)["MTP modules complete"]


def _of_module(change: Callable[[str], str]) -> Callable[[Tensors], Tensors]:
    return lambda stored: {
        change(name) if name.startswith(GLM_MTP) else name: one for name, one in stored.items()
    }


def test_slashes_in_the_place_of_dots_are_told(tmp_path: Path) -> None:
    change = _of_module(lambda name: name.replace(".", "/"))
    found = failures(rewritten(GLM, tmp_path / "jax", change))["MTP modules announced and there"]
    first = "model/layers/3/eh_proj/weight lies where engines look for model.layers.3.eh_proj"
    assert first in found and "left it out" not in found


def test_parameters_in_one_row_are_told(tmp_path: Path) -> None:
    def flat(stored: Tensors) -> Tensors:
        own = [stored.pop(name).flatten() for name in [*stored] if name.startswith(GLM_MTP)]
        return stored | {f"{GLM_MTP}_fsdp_wrapped_module._flat_param": torch.cat(own)}

    found = complete(rewritten(GLM, tmp_path / "flat", flat))
    assert f"{GLM_MTP}_fsdp_wrapped_module._flat_param has all numbers of its layer" in found


def test_an_engines_own_names_are_told(tmp_path: Path) -> None:
    """Experts in one tensor, and joined linears beside them."""

    def as_in_memory(stored: Tensors) -> None:
        experts = f"{GLM_MTP}mlp.experts"
        count = sum(name.startswith(f"{experts}.") for name in stored) // 3

        def of(last: str) -> torch.Tensor:
            names = (f"{experts}.{one}.{last}_proj.weight" for one in range(count))
            return torch.stack([stored.pop(name) for name in names])

        stored[f"{experts}.w13_weight"] = torch.cat([of("gate"), of("up")], 1)
        stored[f"{experts}.w2_weight"] = of("down")
        for own in ("weight", "bias"):
            names = [f"{GLM_MTP}self_attn.{one}_proj.{own}" for one in "qkv"]
            if names[0] in stored:
                joined = torch.cat([stored.pop(name) for name in names])
                stored[f"{GLM_MTP}self_attn.qkv_proj.{own}"] = joined

    found = complete(rewritten(GLM, tmp_path / "state", as_in_memory))
    assert "w13_weight holds all experts in one tensor, as vLLM has them in memory" in found
    assert "self_attn.qkv_proj.weight joins the rows of q_proj, k_proj and v_proj" in found


@pytest.mark.parametrize("folder", ["mtp", "draft"])
def test_a_module_in_a_folder_below_is_told(tmp_path: Path, folder: str) -> None:
    own: Tensors = {}

    def apart(stored: Tensors) -> None:
        own.update({name: stored.pop(name) for name in [*stored] if name.startswith(GLM_MTP)})

    source = rewritten(GLM, tmp_path / "below", apart)
    (source / folder).mkdir()
    save_file(own, source / folder / "model.safetensors")
    found = failures(source)["MTP modules announced and there"]
    assert f"{folder}/model.safetensors lies in a folder of its own" in found


def test_lost_layers_of_another_field_are_told(tmp_path: Path) -> None:
    """LongCat's config.json counts them in `num_layers`."""
    folder = write_dense(tmp_path / "longcat", config=family_config("longcat_flash"))

    def cut(stored: Tensors) -> Tensors:
        gone = ("model.layers.1.", "model.mtp.")
        return {name: one for name, one in stored.items() if not name.startswith(gone)}

    found = failures(rewritten(folder, tmp_path / "cut", cut))
    words = "announces 2 main layers, and nothing is there of main layer 1 and the MTP module"
    assert words in found["main layers announced and there"]


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_count_is_doubted_beside_whole_modules_alone(tmp_path: Path, is_whole: bool) -> None:
    folder = write_dense(tmp_path / "step", config=family_config("step3p5"))
    gone = ("model.layers.6.",) if is_whole else ("model.layers.6.", "model.layers.5.mlp.")

    def cut(stored: Tensors) -> Tensors:
        return {name: one for name, one in stored.items() if not name.startswith(gone)}

    found = failures(rewritten(folder, tmp_path / "cut", cut))["MTP modules announced and there"]
    assert "(model.layers.6 is missing)" in found
    assert ("config.json counts too many" in found) == is_whole


def test_a_class_of_drafts_is_told_beside_layers_of_any_name(tmp_path: Path) -> None:
    folder = write_dense(tmp_path / "inkling", config=family_config("inkling_mm_model"))
    edit_json(folder / "config.json", lambda config: config.update(architectures=["InklingMTP"]))
    assert "name InklingMTP, the class of a draft" in failures(folder)["main model's class"]


def test_another_width_is_told_where_no_main_layer_has_these_names(tmp_path: Path) -> None:
    config = family_config("inkling_mm_model")
    wide = json.loads(json.dumps(config))
    wide["text_config"]["hidden_size"] *= 2
    own, other = (
        write_dense(tmp_path / name, config=one) for name, one in (("own", config), ("wide", wide))
    )
    theirs: Tensors = {}
    rewritten(other, tmp_path / "read", theirs.update)

    def swapped(stored: Tensors) -> Tensors:
        return {name: theirs[name] if ".mtp." in name else one for name, one in stored.items()}

    found = complete(rewritten(own, tmp_path / "swapped", swapped))
    assert "other norms are of hidden states of 128 channels, and config.json and the main" in found


def test_a_transposed_projection_is_told_beside_packed_linears(tmp_path: Path) -> None:
    """Whose rows of codes and scales tell nothing of the whole checkpoint."""
    folder = quantized(GLM, tmp_path / "packed", "awq")

    def turned(stored: Tensors) -> None:
        name = f"{GLM_MTP}eh_proj.weight"
        stored[name] = stored[name].t().contiguous()

    found = complete(rewritten(folder, tmp_path / "turned", turned))
    assert "eh_proj.weight is stored transposed" in found and "whole checkpoint" not in found


def test_every_transposed_linear_is_told(tmp_path: Path) -> None:
    def turned(stored: Tensors) -> None:
        for name, one in stored.items():
            if name.startswith("mtp.") and one.dim() == 2 and one.shape[0] != one.shape[1]:
                stored[name] = one.t().contiguous()

    found = failures(rewritten(QWEN, tmp_path / "turned", turned))["mtp: precision on disk"]
    assert found.count("is stored transposed: it holds") == 5 and "and " in found


def test_parameters_that_were_not_gathered_are_told(tmp_path: Path) -> None:
    def empty(stored: Tensors) -> Tensors:
        return {n: one[:0] if n.startswith(GLM_MTP) else one for n, one in stored.items()}

    found = failures(rewritten(GLM, tmp_path / "zero", empty))
    assert "self_attn.q_proj holds nothing (" in found["mtp: precision on disk"]
    assert "another model" not in " ".join(found.values())


def test_one_ranks_part_of_a_layer_is_told(tmp_path: Path) -> None:
    def half(stored: Tensors) -> None:
        for name in [n for n in stored if n.startswith(GLM_MTP) and n.endswith("_proj.weight")]:
            by_columns = "down_proj" in name or "o_proj" in name
            if "eh_proj" not in name:
                stored[name] = stored[name].chunk(2, int(by_columns))[0].contiguous()

    found = complete(rewritten(GLM, tmp_path / "rank", half))
    assert "matrices are one of 2 parts of themselves" in found and "one rank of 2" in found


@pytest.mark.parametrize(
    "pair", [("self_attn.q_proj", "self_attn.k_proj"), ("up_proj", "down_proj")]
)
def test_matrices_in_each_others_place_are_told(tmp_path: Path, pair: tuple[str, str]) -> None:
    one, other = (f"mtp.layers.0.{'' if '.' in own else 'mlp.'}{own}.weight" for own in pair)

    def exchange(stored: Tensors) -> None:
        stored[one], stored[other] = stored[other], stored[one]

    found = complete(rewritten(QWEN, tmp_path / "exchanged", exchange))
    assert "are in each other's place by their shapes: give each" in found
    assert one in found and other in found


def test_numbers_in_another_shape_are_told(tmp_path: Path) -> None:
    def flat(stored: Tensors) -> Tensors:
        return {
            n: one.flatten() if n.startswith("mtp.layers.") and one.dim() > 1 else one
            for n, one in stored.items()
        }

    found = failures(rewritten(QWEN, tmp_path / "flat", flat))
    assert found["mtp: precision on disk"].count("has its numbers in another shape") > 1
    assert "another model" not in " ".join(found.values())


@pytest.mark.parametrize("word", ["experts.expert_{}", "experts_{}", "expert.{}"])
def test_experts_of_other_names_are_told(tmp_path: Path, word: str) -> None:
    def other(name: str) -> str:
        before, is_expert, after = name.partition("experts.")
        number, _, last = after.partition(".")
        named = is_expert and number.isdecimal()
        return f"{before}{word.format(number)}.{last}" if named else name

    found = complete(rewritten(GLM, tmp_path / "named", _of_module(other)))
    assert f"{GLM_MTP}mlp.{word.format('*')}.up_proj.weight (" in found
    assert f"lies where engines look for {GLM_MTP}mlp.experts.*.up_proj.weight" in found


def test_keys_and_values_in_one_are_told(tmp_path: Path) -> None:
    def joined(stored: Tensors) -> None:
        prefix = "mtp.layers.0.self_attn."
        both = [stored.pop(f"{prefix}{one}_proj.weight") for one in "kv"]
        stored[f"{prefix}kv_proj.weight"] = torch.cat(both)

    found = complete(rewritten(QWEN, tmp_path / "joined", joined))
    assert "kv_proj.weight joins the rows of k_proj and v_proj" in found


CLASSES = {
    "no model_type": ({"model_type": None}, "config.json has no model_type"),
    "no class": ({"architectures": None}, "config.json has no architectures"),
    "another's class": (
        {"architectures": ["LlamaForCausalLM"]},
        "name LlamaForCausalLM, the class of another model than model_type glm4_moe",
    ),
}


@pytest.mark.parametrize("case", CLASSES)
def test_a_main_model_without_its_class_is_told(tmp_path: Path, case: str) -> None:
    fields, words = CLASSES[case]
    source = rewritten(GLM, tmp_path / "unnamed", config=lambda config: config.update(fields))
    assert words in failures(source)["main model's class"]


def test_code_of_its_own_has_a_class_of_any_name(tmp_path: Path) -> None:
    fields = {"architectures": ["LlamaForCausalLM"], "auto_map": {"AutoConfig": "own.Config"}}
    source = rewritten(GLM, tmp_path / "own", config=lambda config: config.update(fields))
    assert run_program("verify", source, "--level", "files").code == 0


FILES: dict[str, tuple[str, bytes, str]] = {
    "pointer": (INDEX, b"version https://git-lfs.github.com/spec/v1\n", "a pointer of Git LFS"),
    "page": ("config.json", b"<!DOCTYPE html><html>403</html>", "an HTML page"),
    "page for a shard": ("model-00002-of-00002.safetensors", b"<html>" * 9, "is an HTML page"),
    "gzip": ("model-00002-of-00002.safetensors", b"\x1f\x8b\x08" + b"5" * 90, "by gzip"),
    "pickle": ("model-00001-of-00002.safetensors", b"PK\x03\x04" + b"5" * 90, "as torch.save"),
}


@pytest.mark.parametrize("case", FILES)
def test_another_file_in_the_place_of_one_is_told(tmp_path: Path, case: str) -> None:
    name, content, words = FILES[case]
    folder = write_dense(tmp_path / "files", config=family_config("mimo"))
    (folder / name).write_bytes(content)
    found = failures(folder)["headers and index"]
    assert words in found and name in found


def test_paths_in_an_index_are_told(tmp_path: Path) -> None:
    folder = write_dense(tmp_path / "files", config=family_config("mimo"))
    edit_json(
        folder / INDEX,
        lambda index: index.update(
            weight_map={name: f"./{file}" for name, file in index["weight_map"].items()}
        ),
    )
    found = failures(folder)["headers and index"]
    assert "write the index without ./" in found and "outside the folder" not in found


def test_a_shard_that_is_a_copy_of_another_is_told(tmp_path: Path) -> None:
    folder = write_dense(tmp_path / "files", config=family_config("mimo"))
    first, second = (folder / f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    second.write_bytes(first.read_bytes())
    found = failures(folder)["headers and index"]
    assert "tensors that are in both" in found and "One of them is a copy of the other" in found


def test_lost_experts_of_main_layers_are_told_by_layer(tmp_path: Path) -> None:
    def half(stored: Tensors) -> Tensors:
        return {n: one for n, one in stored.items() if not re.search(r"experts\.[4-7]\.", n)}

    found = failures(rewritten(GLM, tmp_path / "rank", half))["main: tensors"]
    assert "model.layers.1.mlp.experts lacks experts 4, 5, 6, 7 (of 8); model.layers.2" in found
    assert "is missing" not in found


def test_one_ranks_part_of_a_main_model_is_told(tmp_path: Path) -> None:
    def half(stored: Tensors) -> None:
        for name in [n for n in stored if re.search(r"layers\.[0-2]\..*_proj\.weight$", n)]:
            by_columns = "down_proj" in name or "o_proj" in name
            stored[name] = stored[name].chunk(2, int(by_columns))[0].contiguous()

    found = failures(rewritten(GLM, tmp_path / "rank", half))["main: precision on disk"]
    assert "matrices are one of 2 parts of themselves" in found and "expected" not in found


def test_a_module_beside_the_announced_one_is_told(tmp_path: Path) -> None:
    def twice(stored: Tensors) -> None:
        own = {name: one for name, one in stored.items() if name.startswith(GLM_MTP)}
        stored |= {f"mtp.0.{n.removeprefix(GLM_MTP)}": one.clone() for n, one in own.items()}

    source = rewritten(GLM, tmp_path / "twice", twice)
    assert "there is mtp.0, of which no" in failures(source)["MTP modules announced and there"]


def test_what_is_left_under_a_modules_name_hides_no_rest_elsewhere(tmp_path: Path) -> None:
    """As SGLang calls the layer, beside norms and projection as released."""
    folder = rewritten(
        QWEN,
        tmp_path / "elsewhere",
        lambda stored: {n.replace("mtp.layers.0.", "model.decoder."): t for n, t in stored.items()},
    )
    assert "begin with model.decoder, where engines look for mtp.layers.0" in complete(folder)


QUANTIZED: dict[str, tuple[str, Callable[[Config], object], str]] = {
    "no method": (
        "gptq",
        lambda own: own.pop("quant_method"),
        "quantization_config names no quant_method",
    ),
    "as in Python": (
        "compressed-tensors, int4",
        lambda own: own.update(quant_method="compressed_tensors"),
        "matrices of the MTP module, such as",
    ),
    "in capitals": (
        "awq",
        lambda own: own.update(quant_method="AWQ", modules_to_not_convert=["lm_head"]),
        "matrices of the MTP module, such as",
    ),
}


@pytest.mark.parametrize("case", QUANTIZED)
def test_methods_are_read_as_engines_do(tmp_path: Path, case: str) -> None:
    method, change, words = QUANTIZED[case]
    folder = quantized(GLM, tmp_path / "own", method, lambda c: change(c["quantization_config"]))
    assert words in " ".join(failures(folder).values())


@pytest.mark.parametrize(
    ("field", "readers"),
    [
        ("quantization_config", "vLLM looks there too, SGLang and transformers do not"),
        ("compression_config", "no engine reads it there"),
    ],
)
def test_a_quantization_in_the_text_part_is_told(tmp_path: Path, field: str, readers: str) -> None:
    folder = write_dense(tmp_path / "nested", config=family_config("glm_ocr"))
    method = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    edit_json(folder / "config.json", lambda c: c["text_config"].update({field: method}))
    found = failures(folder)["quantization_config"]
    assert f"has its {field} in text_config: {readers}" in found


def test_codes_of_half_the_width_are_no_ranks_part(tmp_path: Path) -> None:
    def as_fp8(config: Config) -> None:
        config["quantization_config"]["quant_algo"] = "FP8"

    folder = quantized(GLM, tmp_path / "codes", "modelopt nvfp4", as_fp8)
    assert "one rank" not in " ".join(failures(folder).values())


def test_a_lost_main_layer_is_told_beside_a_modules_of_its_number(tmp_path: Path) -> None:
    folder = write_dense(tmp_path / "nemotron", config=family_config("nemotron_h"))

    def cut(stored: Tensors) -> Tensors:
        return {n: one for n, one in stored.items() if not n.startswith("backbone.layers.1.")}

    found = failures(rewritten(folder, tmp_path / "cut", cut))
    assert "nothing is there of main layer 1:" in found["main layers announced and there"]


def test_scales_under_another_name_are_told(tmp_path: Path) -> None:
    """As a script leaves them that takes one format's name for another's."""

    def renamed(stored: Tensors) -> Tensors:
        layer, end = "model.layers.61.", "weight_scale_inv"
        return {
            n.replace(end, "weight_scale") if n.startswith(layer) else n: one
            for n, one in stored.items()
        }

    found = failures(rewritten(FIXTURES / "deepseek-v3-tiny", tmp_path / "scales", renamed))
    cause = found["mtp: precision on disk"]
    assert ".weight_scale lies where engines look for model.layers.61." in cause
    assert cause.count("rename it so, in the files and in the index, if it is the same") > 3


def test_a_lost_module_is_told_beside_a_false_size(tmp_path: Path) -> None:
    folder = write_dense(tmp_path / "lost", config=family_config("mimo"))

    def cut(stored: Tensors) -> Tensors:
        return {n: one for n, one in stored.items() if "mtp" not in n}

    def twice(config: Config) -> None:
        config["vocab_size"] *= 2

    found = failures(rewritten(folder, tmp_path / "cut", cut, twice))
    assert "no tensor of any (model.mtp_layers.0) is there" in found.pop(ANNOUNCED)
    assert "set vocab_size to" in found["config.json"]


ANNOUNCED = "MTP modules announced and there"


@pytest.mark.parametrize("is_wrong", [False, True])
def test_sizes_that_are_false_of_main_layers_too_make_no_other_model(is_wrong: bool) -> None:
    """Codes may be of either size: 4 bits of one are 2 of the other."""
    names = [f"self_attn.{last}_proj.weight" for last in "qkvo"]
    wanted, every, mtp = dict[str, Any](), dict[str, Any](), dict[str, Any]()
    for name in names:
        own = f"model.layers.3.{name}"
        wanted[own] = SimpleNamespace(shape=(16, 8), optional=False, role=Role.ATTENTION)
        mtp[own] = SimpleNamespace(dtype=DType.BF16, shape=(12, 8))
        every[f"model.layers.1.{name}"] = SimpleNamespace(dtype=DType.U8, shape=(64, 1))
    found = of_other_shapes(wanted, every | mtp, mtp, 64, names if is_wrong else [])
    assert bool(found) != is_wrong


def test_constants_of_bitsandbytes_are_no_strange_tensors() -> None:
    wanted, there = dict[str, Any](), dict[str, Any]()
    for last in ("up_proj", "down_proj"):
        wanted[f"model.layers.3.{last}.weight"] = SimpleNamespace(shape=(8, 8), optional=False)
        own = f"mtp.layer.{last}.weight"
        there[own] = SimpleNamespace(dtype=DType.U8, shape=(32, 1))
        there[f"{own}.absmax"] = SimpleNamespace(dtype=DType.F32, shape=(1,))
        there[f"{own}.quant_state.bitsandbytes__nf4"] = SimpleNamespace(dtype=DType.U8, shape=(90,))
    found = other_names(wanted, there)
    assert found is not None and len(found.pairs) == 2 and found.untold == []


def test_a_model_of_which_nothing_was_gathered_is_told(tmp_path: Path) -> None:
    def empty(stored: Tensors) -> Tensors:
        return {name: one[:0] for name, one in stored.items()}

    found = failures(rewritten(QWEN, tmp_path / "zero", empty))
    assert "holds nothing (" in found["main: precision on disk"] and not _internal(found)


def _internal(found: dict[str, str]) -> bool:
    return any(name.startswith("internal") for name in found)


@pytest.mark.parametrize("count", [[1], -1, 1.0, True, "1"])
def test_counts_of_other_kinds_are_quoted(tmp_path: Path, count: object) -> None:
    source = rewritten(
        GLM, tmp_path / "count", config=lambda c: c.update(num_nextn_predict_layers=count)
    )
    found = failures(source)
    said = f"says num_nextn_predict_layers {json.dumps(count)}, and all tensors are stored as by 1"
    assert said in found["config.json"] and not _internal(found)


def test_no_number_of_experts_is_taken_for_a_modules(tmp_path: Path) -> None:
    """Nemotron-Puzzle's has one of its own, which tells nothing where no config is followed."""
    folder = write_dense(tmp_path / "puzzle", config=family_config("nemotron_h_puzzle"))
    method = {"bits": 4, "sym": True}
    edit_json(folder / "config.json", lambda config: config.update(quantization_config=method))
    assert "lacks expert" not in " ".join(failures(folder).values())


@pytest.mark.parametrize("other", ["mtp.layers.1.", "mtp.layers.0._fsdp_wrapped_module."])
def test_a_layer_of_another_name_is_no_module_too_many(tmp_path: Path, other: str) -> None:
    folder = rewritten(
        QWEN,
        tmp_path / "named",
        lambda stored: {n.replace("mtp.layers.0.", other): one for n, one in stored.items()},
    )
    found = failures(folder)
    assert ANNOUNCED not in found
    assert f"begin with {other.rstrip('.')}, where engines" in found["MTP modules complete"]


@pytest.mark.parametrize("model_type", [{}, [], 7])
def test_a_model_type_that_is_no_text_is_no_internal_error(
    tmp_path: Path, model_type: object
) -> None:
    source = rewritten(GLM, tmp_path / "type", config=lambda c: c.update(model_type=model_type))
    outcome = run_program("verify", source, "--level", "files")
    assert "internal" not in outcome.out


def test_gates_that_were_quantized_as_all_linears_pass(tmp_path: Path) -> None:
    """As where `ignore` has none of a delta net's: engines build them by the config too."""
    scheme = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": scheme | {"strategy": "channel"},
        "input_activations": scheme | {"strategy": "token", "dynamic": True},
    }
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:^mtp.*"],
    }

    def quantize(stored: Tensors) -> None:
        for name, one in [*stored.items()]:
            if name.startswith("model.layers.") and one.dim() == 2:
                scale = one.float().abs().amax(1, keepdim=True) / 448
                stored[name] = (one.float() / scale).to(torch.float8_e4m3fn)
                stored[f"{name}_scale"] = scale

    folder = rewritten(
        QWEN,
        tmp_path / "all",
        quantize,
        lambda config: config.update(quantization_config=quantization),
    )
    outcome = run_program("verify", folder, "--level", "weights")
    assert outcome.code == 0, outcome.out
