"""GGUF files of Qwen3.5 and Qwen3-Next: heads in the order of llama.cpp's graph, norms around one,
decay rates, and back again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from bundle.test_gguf_bundles import keys_of, readers, stored
from cases import export, quantize, read_tensors, run_program
from mtp_checkpoints.containers.gguf_architectures import ARCHITECTURE_OF
from mtp_checkpoints.families import family_of
from runtime.checkpoints import SMALL_CONFIGS, write_checkpoint

TARGET = ("--target", "llama.cpp", "--pre-tokenizer", "gpt-2")
TOKENIZER = Path("fixtures/qwen3-5-tiny/tokenizer.json").resolve()
# llama.cpp has one size for keys and values.
SIZES = {"linear_key_head_dim": 32, "linear_value_head_dim": 32, "vocab_size": 2048}
KEY_HEADS, VALUE_HEADS, HEAD = 2, 4, 32
TYPES = ("qwen3_5_text", "qwen3_5_moe", "qwen3_next")  # the second beside a vision tower
LAYERS = 4


def config_of(model_type: str, **changes: Any) -> dict[str, Any]:
    config = SMALL_CONFIGS[model_type]
    text = config.get("text_config", config) | SIZES | {"torch_dtype": "bfloat16"} | changes
    return {**config, "text_config": text} if "text_config" in config else text


def in_turns(values: torch.Tensor, size: int, first: int = 0) -> torch.Tensor:
    """Rows as `_reorder_v_heads` of llama.cpp's converter leaves them, behind the first ones."""
    own = values[first:].reshape(KEY_HEADS, VALUE_HEADS // KEY_HEADS, size, *values.shape[1:])
    return torch.cat((values[:first], own.transpose(0, 1).reshape(values[first:].shape)))


def expected(tensors: dict[str, torch.Tensor], own: str, block: str) -> dict[str, torch.Tensor]:
    """Tensors of a layer with a gated delta net, by llama.cpp's names."""
    delta, before = f"{own}linear_attn.", 2 * KEY_HEADS * HEAD
    of = {name.removeprefix(delta): one for name, one in tensors.items() if name.startswith(delta)}
    if "in_proj_qkvz.weight" in of:
        return expected_of_next(of, block)
    columns = in_turns(of["out_proj.weight"].T, HEAD).T
    return {
        f"{block}attn_qkv.weight": in_turns(of["in_proj_qkv.weight"], HEAD, before),
        f"{block}attn_gate.weight": in_turns(of["in_proj_z.weight"], HEAD),
        f"{block}ssm_alpha.weight": in_turns(of["in_proj_a.weight"], 1),
        f"{block}ssm_beta.weight": in_turns(of["in_proj_b.weight"], 1),
        f"{block}ssm_a": -torch.exp(in_turns(of["A_log"].float(), 1)),
        f"{block}ssm_dt.bias": in_turns(of["dt_bias"], 1),
        f"{block}ssm_conv1d.weight": in_turns(of["conv1d.weight"].squeeze(1), HEAD, before),
        f"{block}ssm_norm.weight": of["norm.weight"],
        f"{block}ssm_out.weight": columns,
        f"{block}attn_norm.weight": tensors[f"{own}input_layernorm.weight"].float() + 1,
    }


def expected_of_next(of: dict[str, torch.Tensor], block: str) -> dict[str, torch.Tensor]:
    """The same for Qwen3-Next, whose heads stay in their order."""
    values = VALUE_HEADS // KEY_HEADS * HEAD
    by_head = of["in_proj_qkvz.weight"].view(KEY_HEADS, 2 * HEAD + 2 * values, -1)
    kinds = [kind.flatten(0, 1) for kind in by_head.split([HEAD, HEAD, values, values], dim=1)]
    return {
        f"{block}attn_qkv.weight": torch.cat(kinds[:3]),
        f"{block}attn_gate.weight": kinds[3],
        f"{block}ssm_ba.weight": of["in_proj_ba.weight"],
        f"{block}ssm_a": -torch.exp(of["A_log"].float()),
        f"{block}ssm_dt.bias": of["dt_bias"],
        f"{block}ssm_conv1d.weight": of["conv1d.weight"].squeeze(1),
        f"{block}ssm_out.weight": of["out_proj.weight"],
    }


@pytest.fixture(scope="module", params=TYPES)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param) / "source"
    write_checkpoint(folder, config_of(request.param))
    shutil.copy(TOKENIZER, folder)
    return folder


@pytest.fixture(scope="module")
def bundle(source: Path) -> Path:
    outcome = export(source, source.with_name("bundle"), *TARGET)
    assert outcome.code == 0, outcome.err
    return source.with_name("bundle")


def test_tensors_are_as_the_graph_has_them(source: Path, bundle: Path) -> None:
    config, tensors = json.loads((source / "config.json").read_text()), read_tensors(source)
    prefix = "model.language_model." if "text_config" in config else "model."
    main, mtp = (stored(bundle / part) for part in ("main", "mtp"))
    wanted = expected(tensors, f"{prefix}layers.0.", "blk.0.")
    for name, values in wanted.items():
        assert torch.equal(main[name][1].float(), values.float()), name
    assert not any("visual" in name for name in main)
    module = f"blk.{LAYERS}.nextn."
    assert torch.equal(mtp[f"{module}eh_proj.weight"][1], tensors["mtp.fc.weight"])
    assert torch.equal(
        mtp[f"{module}hnorm.weight"][1], tensors["mtp.pre_fc_norm_hidden.weight"].float() + 1
    )
    assert torch.equal(mtp["token_embd.weight"][1], tensors[f"{prefix}embed_tokens.weight"])
    assert ("output.weight" in mtp) is ("lm_head.weight" in tensors)
    (reader,) = readers(bundle / "mtp")
    name = keys_of(reader)["general.architecture"]
    recurrent = keys_of(reader)[f"{name}.attention.recurrent_layers"]
    assert recurrent == [True, True, True, False, False]


def test_they_are_read_as_they_were_released(source: Path, bundle: Path) -> None:
    found = run_program("verify", bundle, "--source", source, "--level", "weights")
    assert found.code == 0, found.out + found.err


def test_blocks_are_read_as_they_were_released(source: Path, tmp_path: Path) -> None:
    """Rows of blocks change places as they are; columns do by their values."""
    outcome = quantize(source, tmp_path / "q8", *TARGET, "--base-quant", "q8_0")
    assert outcome.code == 0, outcome.err
    assert stored(tmp_path / "q8/main")["blk.0.attn_qkv.weight"][0] == "Q8_0"
    found = run_program("verify", tmp_path / "q8", "--source", source, "--level", "weights")
    assert found.code == 0, found.out + found.err


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"])
def test_keys_lead_back_to_the_model(model_type: str) -> None:
    config = config_of(model_type)
    spec, one = family_of(config), ARCHITECTURE_OF[model_type]
    keys = one.keys(spec, modules=1)
    names = ["token_embd.weight"] if config["tie_word_embeddings"] else ["output.weight"]
    again = one.config(keys, names)
    assert again["model_type"] == model_type
    assert family_of(again).layers == spec.layers
    assert family_of(again).mtp == spec.mtp
    assert family_of(again).tensors == spec.tensors


def test_heads_of_two_sizes_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "source", config_of("qwen3_5_text", linear_key_head_dim=16))
    outcome = export(tmp_path / "source", tmp_path / "out", *TARGET[:3], "none")
    assert outcome.code == 4 and "one size for the keys and values" in outcome.err
    assert not (tmp_path / "out").exists()
