"""Every target's folders, name by name, dtype by dtype and byte by byte, against what its engine
asks for. The expected names are written out here, not derived from the code under test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cases import (
    MTP_LAYER,
    TINY_CONFIG,
    edit_json,
    export,
    make_checkpoint,
    read_json,
    read_tensors,
)
from mtp_checkpoints.families import FAMILIES, deepseek_v3
from mtp_checkpoints.layouts import TARGETS

LINEARS = [
    *(
        f"self_attn.{n}"
        for n in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
    ),
    *(f"mlp.shared_experts.{n}" for n in ("gate_proj", "up_proj", "down_proj")),
    *(f"mlp.experts.{e}.{n}" for e in range(4) for n in ("gate_proj", "up_proj", "down_proj")),
]
BLOCK_PLAIN = [
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "self_attn.q_a_layernorm.weight",
    "self_attn.kv_a_layernorm.weight",
    "mlp.gate.weight",
    "mlp.gate.e_score_correction_bias",
]
BLOCK = [*BLOCK_PLAIN, *(f"{name}.weight" for name in LINEARS)]
SCALES = [f"{name}.weight_scale_inv" for name in LINEARS]
MTP_OWN = ["enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"]
SHARED = ["embed_tokens.weight", "shared_head.head.weight"]
SOURCE = f"model.layers.{MTP_LAYER}."

# Per layout: the engine's name for each of the source's (without the layer prefix). SGLang, vLLM
# and TensorRT-LLM ask for those of hf.
NAMES: dict[str, dict[str, str]] = {
    "hf": {n: SOURCE + n for n in [*BLOCK, *SCALES, *MTP_OWN, *SHARED]},
    "lightllm": {n: f"model.layers.0.{n}" for n in [*BLOCK, *SCALES, *MTP_OWN, *SHARED]},
    "xllm": {
        **{n: f"model.layers.0.{n}" for n in BLOCK},
        **{n: f"model.{n}" for n in [*MTP_OWN, *SHARED]},
    },
    "paddlenlp": {
        **{n: f"deepseek_v3_mtp.layers.0.{n}" for n in [*BLOCK, *SCALES]},
        **{n: f"deepseek_v3_mtp.{n}" for n in ("enorm.weight", "hnorm.weight", "eh_proj.weight")},
        "shared_head.norm.weight": "deepseek_v3_mtp.norm.weight",
        "embed_tokens.weight": "deepseek_v3_mtp.embed_tokens.weight",
        "shared_head.head.weight": "lm_head.weight",
    },
    "eagle": {
        **{n: f"layers.0.{n}" for n in [*BLOCK, *SCALES]},
        "enorm.weight": "enorm.weight",
        "hnorm.weight": "hnorm.weight",
        "eh_proj.weight": "fc.weight",
        "shared_head.norm.weight": "norm.weight",
        "embed_tokens.weight": "embed_tokens.weight",
        "shared_head.head.weight": "lm_head.weight",
    },
}
ONE_LAYER = {"num_hidden_layers": 1, "first_k_dense_replace": 0, "num_nextn_predict_layers": 1}
CONFIG: dict[str, dict[str, Any]] = {
    "hf": {
        "num_hidden_layers": 4,
        "num_nextn_predict_layers": 1,
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "quantization_config": TINY_CONFIG["quantization_config"],
    },
    "lightllm": ONE_LAYER | {"quantization_config": TINY_CONFIG["quantization_config"]},
    "xllm": ONE_LAYER
    | {
        "model_type": "deepseek_v3_mtp",
        "architectures": ["DeepseekMTPForCausalLM"],
        "quantization_config": "",
    },
    "paddlenlp": ONE_LAYER | {"quantization_config": TINY_CONFIG["quantization_config"]},
    "eagle": ONE_LAYER
    | {
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "quantization_config": TINY_CONFIG["quantization_config"],
    },
}


def dequantized(source: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """One fp8 weight in bf16, tile by tile: fp32 product, one rounding."""
    codes, scale = source[f"{SOURCE}{name}"].float(), source[f"{SOURCE}{name}_scale_inv"]
    for row in range(scale.shape[0]):
        for column in range(scale.shape[1]):
            tile = (slice(row * 128, row * 128 + 128), slice(column * 128, column * 128 + 128))
            codes[tile] *= scale[row, column]
    return codes.to(torch.bfloat16)


def expected_value(target: str, source: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    value = source[SOURCE + name]
    if target == "xllm" and f"{SOURCE}{name}_scale_inv" in source:
        return dequantized(source, name)
    if target == "paddlenlp" and value.dim() == 2 and name != "embed_tokens.weight":
        return value.view(torch.uint8 if value.itemsize == 1 else value.dtype).t().view(value.dtype)
    return value


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
    )


@pytest.fixture
def other_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint of another model with DeepSeek's tensors."""
    monkeypatch.setitem(FAMILIES, "other_model", deepseek_v3.spec)
    changes = {"model_type": "other_model", "architectures": ["OtherModelForCausalLM"]}
    return make_checkpoint(tmp_path / "other", TINY_CONFIG | changes)


def test_the_released_layout_keeps_the_architecture_of_its_source(
    other_model: Path, output: Path
) -> None:
    assert export(other_model, output, "--quiet").code == 0
    for part in ("main", "mtp"):
        assert read_json(output / part / "config.json") == read_json(other_model / "config.json")


@pytest.mark.parametrize("target", [name for name in NAMES if name != "hf"])
def test_layouts_of_deepseek_refuse_other_models(
    target: str, other_model: Path, output: Path
) -> None:
    refused = export(other_model, output, "--target", target)
    assert refused.code == 4
    assert f"Target {target} has no layout for this model" in refused.err
    assert "Expected model_type deepseek_v3" in refused.err and "'other_model'" in refused.err
    assert not output.exists()


def test_every_layout_has_its_names_here() -> None:
    assert NAMES.keys() == CONFIG.keys()
    # Those of GGUF files are in tests/bundle/test_gguf_bundles.py.
    assert TARGETS.keys() == NAMES.keys() | {"llama.cpp"}


@pytest.mark.parametrize("target", NAMES)
def test_mtp_folder(target: str, pristine: Path, output: Path) -> None:
    outcome = export(pristine, output, "--target", target, "--quiet", "--max-shard-size", "300kB")
    assert outcome.code == 0, outcome.err
    stored, original = read_tensors(output / "mtp"), read_tensors(pristine)
    assert sorted(stored) == sorted(NAMES[target].values())
    for name, engine_name in NAMES[target].items():
        assert same_bytes(stored[engine_name], expected_value(target, original, name)), name
    config = read_json(output / "mtp" / "config.json")
    assert {key: config[key] for key in CONFIG[target]} == CONFIG[target]
    unchanged = read_json(pristine / "config.json").keys() - CONFIG[target].keys()
    assert {k: config[k] for k in unchanged} == {
        k: read_json(pristine / "config.json")[k] for k in unchanged
    }


@pytest.mark.parametrize("target", NAMES)
def test_folders_are_complete_and_nothing_is_stale(
    target: str, pristine: Path, output: Path
) -> None:
    assert export(pristine, output, "--target", target, "--quiet").code == 0
    for part in ("main", "mtp"):
        folder = output / part
        index = read_json(folder / "model.safetensors.index.json")
        shards = set(index["weight_map"].values())
        others = {
            "config.json",
            "generation_config.json",
            "tokenizer.json",
            "tokenizer_config.json",
        }
        assert {path.name for path in folder.iterdir()} == shards | others | {
            "model.safetensors.index.json"
        }
        tensors = read_tensors(folder)
        assert index["weight_map"].keys() == tensors.keys()
        total = sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
        assert index["metadata"]["total_size"] == total
        assert (folder / "tokenizer.json").read_bytes() == (
            pristine / "tokenizer.json"
        ).read_bytes()
    assert sorted(path.name for path in output.iterdir()) == ["main", "mtp", "mtp_export.json"]


def test_main_folder_is_the_source_without_the_mtp_layer(pristine: Path, output: Path) -> None:
    assert export(pristine, output, "--quiet").code == 0
    original, main = read_tensors(pristine), read_tensors(output / "main")
    assert main.keys() == {name for name in original if not name.startswith(SOURCE)}
    assert all(same_bytes(main[name], original[name]) for name in main)
    assert read_json(output / "main" / "config.json") == read_json(pristine / "config.json")


@pytest.mark.parametrize("target", ["lightllm", "hf"])
def test_scale_and_weight_share_a_shard(target: str, pristine: Path, output: Path) -> None:
    source = read_json(pristine / "model.safetensors.index.json")["weight_map"]
    split = [
        name
        for name in source
        if name.endswith("_scale_inv") and source[name] != source[name.removesuffix("_scale_inv")]
    ]
    assert any(name.startswith(SOURCE) for name in split), "the source must have a split pair"
    assert export(pristine, output, "--target", target, "--max-shard-size", "100kB").code == 0
    index = read_json(output / "mtp" / "model.safetensors.index.json")["weight_map"]
    assert len(set(index.values())) > 3
    pairs = [name for name in index if name.endswith("_scale_inv")]
    together = [name for name in pairs if index[name] == index[name.removesuffix("_scale_inv")]]
    assert len(pairs) == len(SCALES)
    assert together == pairs


@pytest.mark.parametrize("alias", ["vllm", "sglang", "tensorrt-llm"])
def test_aliases_write_hf_and_say_so(alias: str, pristine: Path, tmp_path: Path) -> None:
    outcome = export(pristine, tmp_path / "a", "--target", alias)
    assert outcome.code == 0
    assert f"{alias} is an alias" in outcome.err
    assert "--target hf" in outcome.err
    assert sorted(read_tensors(tmp_path / "a/mtp")) == sorted(NAMES["hf"].values())
    assert export(pristine, tmp_path / "b", "--target", "hf").code == 0
    one, other = (read_json(tmp_path / d / "mtp_export.json") for d in "ab")
    assert one["options"].pop("engine") == alias
    assert one == other


def test_shared_weights_come_from_main_when_the_layer_has_none(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", own_copies=False)
    assert export(source, tmp_path / "out", "--quiet").code == 0
    mtp, original = read_tensors(tmp_path / "out/mtp"), read_tensors(source)
    for own, main in (
        ("embed_tokens.weight", "model.embed_tokens.weight"),
        ("shared_head.head.weight", "lm_head.weight"),
    ):
        assert same_bytes(mtp[SOURCE + own], original[main])


def test_drop_leaves_shared_weights_out_where_the_engine_has_the_main_model_s(
    pristine: Path, tmp_path: Path
) -> None:
    assert export(pristine, tmp_path / "out", "--shared-weights", "drop").code == 0
    names = read_tensors(tmp_path / "out/mtp").keys()
    assert sorted(names) == sorted(SOURCE + n for n in [*BLOCK, *SCALES, *MTP_OWN])
    refused = export(
        pristine, tmp_path / "paddle", "--shared-weights", "drop", "--target", "paddlenlp"
    )
    assert refused.code == 4
    assert "paddlenlp" in refused.err
    assert not (tmp_path / "paddle").exists()


@pytest.mark.parametrize("part", ["main", "mtp"])
def test_part_leaves_the_other_out(part: str, pristine: Path, output: Path) -> None:
    assert export(pristine, output, "--part", part).code == 0
    assert sorted(path.name for path in output.iterdir()) == [part, "mtp_export.json"]
    assert read_tensors(output / part)


UNCONVERTED = {
    "lightllm": ["lm_head", "model.layers.0.eh_proj", "model.layers.0.shared_head.head"],
    "paddlenlp": ["lm_head", "deepseek_v3_mtp.eh_proj", "lm_head"],
    "eagle": ["lm_head", "fc", "lm_head"],
}


@pytest.mark.parametrize("target", UNCONVERTED)
def test_modules_that_are_not_quantized_are_named_as_in_the_draft(
    target: str, source: Path, output: Path
) -> None:
    """Other layers' modules are left out: the draft's layer 0 is not the main model's."""
    listed = ["lm_head", f"{SOURCE}eh_proj", f"{SOURCE}shared_head.head"]

    def leave_out(config: dict[str, Any]) -> None:
        config["quantization_config"]["modules_to_not_convert"] = [
            *listed,
            "model.layers.0.mlp.gate",
        ]

    edit_json(source / "config.json", leave_out)
    assert export(source, output, "--target", target).code == 0
    config = read_json(output / "mtp/config.json")["quantization_config"]
    assert config["modules_to_not_convert"] == UNCONVERTED[target]


def test_a_whole_mtp_layer_that_is_not_quantized(tmp_path: Path) -> None:
    quantization = TINY_CONFIG["quantization_config"] | {
        "ignored_layers": [f"model.layers.{MTP_LAYER}"]
    }
    source = make_checkpoint(tmp_path / "s", TINY_CONFIG | {"quantization_config": quantization})
    for target, name in (
        ("lightllm", "model.layers.0"),
        ("paddlenlp", "deepseek_v3_mtp.layers.0"),
        ("eagle", "layers.0"),
    ):
        assert export(source, tmp_path / target, "--target", target).code == 0
        config = read_json(tmp_path / target / "mtp/config.json")["quantization_config"]
        assert config["ignored_layers"] == [name]
        assert not [n for n in read_tensors(tmp_path / target / "mtp") if "scale" in n]


def test_two_mtp_layers(tmp_path: Path) -> None:
    config = TINY_CONFIG | {"num_nextn_predict_layers": 2, "num_hidden_layers": 2}
    source = make_checkpoint(tmp_path / "source", config)
    assert export(source, tmp_path / "out").code == 0
    layers = {name.split(".")[2] for name in read_tensors(tmp_path / "out/mtp")}
    assert layers == {"2", "3"}
    refused = export(source, tmp_path / "other", "--target", "xllm")
    assert refused.code == 4
    assert "num_nextn_predict_layers 1" in refused.err


def test_a_layer_number_is_matched_whole(tmp_path: Path) -> None:
    """Layer 1 is not layer 10, and layer 10 not layer 1: no prefix without its dot."""
    config = TINY_CONFIG | {"num_hidden_layers": 10, "n_routed_experts": 2, "n_group": 1}
    source = make_checkpoint(tmp_path / "source", config)
    assert export(source, tmp_path / "out").code == 0
    main = {name.split(".")[2] for name in read_tensors(tmp_path / "out/main") if "layers" in name}
    assert main == {str(layer) for layer in range(10)}
    mtp = {name.split(".")[2] for name in read_tensors(tmp_path / "out/mtp")}
    assert mtp == {"10"}


def test_unquantized_source(tmp_path: Path) -> None:
    config = {k: v for k, v in TINY_CONFIG.items() if k != "quantization_config"}
    source = make_checkpoint(tmp_path / "source", config)
    for target in NAMES:
        assert export(source, tmp_path / target, "--target", target).code == 0
        stored = read_tensors(tmp_path / target / "mtp")
        wanted = {engine for name, engine in NAMES[target].items() if name not in SCALES}
        assert stored.keys() == wanted
