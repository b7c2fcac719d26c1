"""A config.json that is wrong by a field, by a few, or by the place of its text part: the one by
which all tensors are as stored is named, and nothing else is said."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cases import edit_json, run_program
from faults.small_model import family_config, write_dense
from mtp_checkpoints.families import family_of
from mtp_export.verify.check import Problem, verdict
from runtime.checkpoints import changed
from verify.foreign import GLM, GLM_MTP, INDEX, Config, Tensors, rewritten, without

ITEM = "config.json"


def failed(folder: Path, *options: object) -> dict[str, dict[str, Any]]:
    outcome = run_program("verify", folder, "--level", "files", "--json", "--quiet", *options)
    assert outcome.code == 7
    checks = json.loads(outcome.out)["checks"]
    items = [item for check in checks for item in check["items"]]
    return {item["name"]: item for item in items if item["status"] == "fail"}


def _fields(**values: object) -> Callable[[Config], object]:
    return lambda config: (config.get("text_config") or config).update(values)


def _nested(config: Config) -> None:
    config["text_config"] = {"text_config": config["text_config"]}


def _flat(config: Config) -> None:
    text = config.pop("text_config")
    config |= {key: text[key] for key in text.keys() - config.keys()}


def _wrapped(config: Config) -> None:
    fields = ("hidden_size", "vocab_size", "num_hidden_layers", "num_nextn_predict_layers")
    config["text_config"] = {key: config.pop(key) for key in (*fields, "intermediate_size")}


CASES: dict[str, tuple[str, Callable[[Config], object], str]] = {
    "another width": (
        "exaone4_5",
        _fields(hidden_size=128),
        "says text_config.hidden_size 128, and all tensors are stored as by 64: set text_config",
    ),
    "another number of experts": (
        "hy_v3",
        _fields(num_experts=16),
        "says num_experts 16, and all tensors are stored as by 8: set num_experts to 8",
    ),
    "kinds of layers": (
        "qwen3_5_moe",
        lambda config: config["text_config"]["layer_types"].reverse(),
        r'layer_types\[0\] "full_attention" and \S+layer_types\[3\] "linear_attention", and all',
    ),
    "a pattern of layers": (
        "nemotron_h",
        _fields(hybrid_override_pattern="-*MEM"),
        r'set hybrid_override_pattern to "MEM\*-"',
    ),
    "layers with experts": ("step3p5", _fields(moe_layers_enum="1"), 'moe_layers_enum to "1,2,3"'),
    "a rank that is null": ("deepseek_v32", _fields(q_lora_rank=None), "set q_lora_rank to 32"),
    "no number of shared experts": (
        "exaone_moe",
        _fields(num_shared_experts=None),
        "set num_shared_experts to 1",
    ),
    "no shared expert": ("hy_v3", _fields(num_shared_experts=0), "set num_shared_experts to 1"),
    "several sizes": (
        "mimo",
        _fields(hidden_size=128, intermediate_size=192),
        "128 and intermediate_size 192, and all tensors are stored as by 64 and 96",
    ),
    "more layers than there are": (
        "nemotron_h",
        _fields(num_hidden_layers=6),
        "num_hidden_layers 6, and all tensors are stored as by 5.* unless the last main layers",
    ),
    "more modules than any release has": (
        "nemotron_h",
        _fields(num_nextn_predict_layers=2),
        "says num_nextn_predict_layers 2, and all tensors are stored as by 1",
    ),
    "norms that are there": (
        "hy_v3",
        _fields(qk_norm=False),
        "says qk_norm false, and all tensors are stored as by true: set qk_norm to true",
    ),
    "a part of each head": (
        "deepseek_v32",
        _fields(qk_rope_head_dim=16),
        "says qk_rope_head_dim 16, and all tensors are stored as by 8",
    ),
    "fewer layers beside a module of another name": (
        "qwen4_exp_text",
        _fields(num_hidden_layers=3),
        "says num_hidden_layers 3, and all tensors are stored as by 4",
    ),
    "no module of several": (
        "step3p5",
        _fields(num_nextn_predict_layers=0),
        "num_nextn_predict_layers 0, and all tensors are stored as by 3.* without speculation",
    ),
    "no module of several layers": (
        "nemotron_h_puzzle",
        _fields(num_nextn_predict_layers=0),
        "num_nextn_predict_layers 0, and all tensors are stored as by 1.* without speculation",
    ),
    "no module in a block": (
        "inkling_mm_model",
        lambda config: config["mtp_config"].update(num_nextn_predict_layers=0),
        "mtp_config.num_nextn_predict_layers 0, and all tensors are stored as by 2",
    ),
    "biases that are there": (
        "glm4_moe",
        _fields(attention_bias=False),
        "says attention_bias false, and all tensors are stored as by true",
    ),
    "dense layers that have experts": (
        "glm4_moe",
        _fields(first_k_dense_replace=2),
        "says first_k_dense_replace 2, and all tensors are stored as by 1",
    ),
    "fewer modules than there are": (
        "step3p5",
        _fields(num_nextn_predict_layers=1),
        "says num_nextn_predict_layers 1, and all tensors are stored as by 3",
    ),
    "a text part in another": ("minicpmv4_6", _nested, "in text_config.text_config, and engines"),
    "no text part": (
        "intern_s2_preview",
        _flat,
        "in config.json itself, and engines look for them",
    ),
    "a text part of a text model": ("mimo", _wrapped, "are in text_config, and engines look for"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_field_that_is_wrong_is_named_alone(tmp_path: Path, case: str) -> None:
    model_type, change, words = CASES[case]
    folder = write_dense(tmp_path / "checkpoint", config=family_config(model_type))
    edit_json(folder / "config.json", change)
    items = failed(folder)
    assert items.keys() == {ITEM}
    assert re.search(words, items[ITEM]["cause"]), items[ITEM]["cause"]


def test_what_is_left_of_a_module_is_no_main_layer(tmp_path: Path) -> None:
    def block_alone(stored: Tensors) -> None:
        for name in [*stored]:
            last = name.removeprefix(GLM_MTP)
            if last != name and not last.startswith(("self_attn.", "mlp.", "input_", "post_")):
                del stored[name]

    items = failed(rewritten(GLM, tmp_path / "damaged", block_alone))
    assert ITEM not in items
    assert "eh_proj" in " ".join(item["cause"] for item in items.values())


def test_tensors_that_no_field_explains_are_named(tmp_path: Path) -> None:
    folder = write_dense(tmp_path / "checkpoint", config=family_config("mimo"))

    def narrower(stored: Tensors) -> None:
        name = "model.layers.1.mlp.down_proj.weight"
        stored[name] = stored[name][:, :64].contiguous()

    (folder / INDEX).unlink()
    items = failed(rewritten(folder, tmp_path / "damaged", narrower, _fields(hidden_size=128)))
    assert ITEM not in items
    assert "hidden_size" not in " ".join(item["cause"] for item in items.values())


def test_a_draft_of_another_width_in_its_own_folder_is_named(tmp_path: Path) -> None:
    folders = []
    for name, width, of_mtp in (("main", 64, False), ("mtp", 128, True)):
        config = changed(family_config("exaone_moe"), hidden_size=width)
        mtp = family_of(config).mtp_tensors.keys()
        folder = write_dense(tmp_path / f"whole-{name}", config=config)

        def kept(stored: Tensors, own: Any = mtp, wanted: bool = of_mtp) -> Tensors:
            return {n: one for n, one in stored.items() if (n in own) == wanted}

        folders.append(rewritten(folder, tmp_path / name, kept))
    items = failed(folders[0], "--mtp", folders[1])
    assert items.keys() == {"draft and main of one model"}
    assert "hidden_size differs" in items["draft and main of one model"]["cause"]


@pytest.mark.parametrize("layer", [GLM_MTP, "model.layers.1."])
def test_a_draft_folder_that_counts_its_own_layer(layer: str, tmp_path: Path) -> None:
    """One whose tensors follow that layer is a draft; one whose names are the main model's needs
    its count."""

    def draft_alone(stored: Tensors) -> Tensors:
        mtp = {name: one for name, one in stored.items() if name.startswith(GLM_MTP)}
        return {name.replace(GLM_MTP, layer): one for name, one in mtp.items()}

    count = _fields(num_hidden_layers=1)
    main = rewritten(GLM, tmp_path / "main", without(GLM_MTP))
    draft = rewritten(GLM, tmp_path / "draft", draft_alone, count)
    if layer != GLM_MTP:
        outcome = run_program("verify", main, "--mtp", draft, "--level", "files")
        assert outcome.code == 0, outcome.out
        edit_json(draft / "config.json", _fields(hidden_size=64))
        assert "draft and main of one model" in failed(main, "--mtp", draft)
        return
    (item,) = failed(main, "--mtp", draft).values()
    assert f"config.json of {draft} says num_hidden_layers 1" in item["cause"]
    assert "set num_hidden_layers to 3 there" in item["cause"]


def test_problems_that_are_more_than_what_is_there_are_counted_apart() -> None:
    problems = [Problem(name, name) for name in ("a", "b", "c")]
    assert verdict("", problems, "2 tensors").figure == "3 problems, 2 tensors"
    assert verdict("", problems, "1,000 tensors").figure == "3 wrong of 1,000 tensors"
