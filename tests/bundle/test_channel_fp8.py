"""GLM's fp8 releases: compressed-tensors with a scale per channel, the MTP layer's head included,
and shards that the index does not name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cases import (
    edit_json,
    export,
    nightly_but,
    quantize,
    read_json,
    read_tensors,
    run_program,
)
from faults.small_model import family_config, in_channels, write_channels, write_dense
from mtp_runtime import LLM, SamplingParams
from quantized_by_others import write
from verify.foreign_damages import in_compressed_blocks
from verify.foreign_folders import both

CONFIG = family_config("glm4_moe")
LAYER = f"model.layers.{CONFIG['num_hidden_layers']}"
HEAD = f"{LAYER}.shared_head.head.weight"
INDEX = "model.safetensors.index.json"
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
INTEGERS, FP8 = ("weight_only_int4", "weight_only_int8"), ("a8w8_fp8", "a8w8_fp8")


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dense(tmp_path_factory.mktemp("dense") / "source", config=CONFIG)


@pytest.fixture(scope="module")
def pristine_channels(dense: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_channels(dense, tmp_path_factory.mktemp("channels") / "source")


@pytest.fixture
def channels(pristine_channels: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine_channels, tmp_path / "source"))


def test_an_export_keeps_every_byte_and_lists_every_tensor(channels: Path, output: Path) -> None:
    found = run_program("inspect", channels)
    assert found.code == 0, found.out + found.err
    words = " ".join(found.out.split())
    assert "Not in the index: mtp.safetensors" in words
    assert f"{HEAD}: own copy in fp8_channel, lm_head.weight in bf16" in words
    outcome = export(channels, output, "--link", "copy")
    assert outcome.code == 0, outcome.err
    assert "mtp.safetensors is not in the source's index" in " ".join(outcome.err.split())
    original, stored = read_tensors(channels), read_tensors(output / "mtp")
    embedding = f"{LAYER}.embed_tokens.weight"
    assert stored.pop(embedding).equal(original["model.embed_tokens.weight"])
    assert stored.keys() == {name for name in original if name.startswith(LAYER)}
    for name, tensor in stored.items():
        assert tensor.view(torch.uint8).equal(original[name].view(torch.uint8)), name
    assert read_json(output / "mtp" / INDEX)["weight_map"].keys() == {*stored, embedding}
    outcome = run_program("verify", output, "--source", channels, "--level", "weights", "--quiet")
    assert outcome.code == 0, outcome.out + outcome.err
    llm = LLM(output, speculate_method="mtp")
    assert len(llm.generate(["def read("], PARAMS)[0].token_ids) == 8
    assert HEAD in llm.ledger.tied


def test_without_a_copy_none_is_written_in_another_precision(channels: Path, output: Path) -> None:
    """config.json promises the copy in fp8, and the main model's head is in bf16."""
    path = channels / "mtp.safetensors"
    save_file({n: t for n, t in load_file(path).items() if "shared_head.head" not in n}, path)
    outcome = export(channels, output, "--link", "copy")
    assert outcome.code == 0, outcome.err
    assert HEAD not in read_tensors(output / "mtp")


@pytest.mark.parametrize(("base", "mtp"), nightly_but([INTEGERS], (INTEGERS, FP8)))
def test_a_quantization_reads_what_the_channels_hold(
    channels: Path, output: Path, base: str, mtp: str
) -> None:
    options = ("--base-quant", base, "--mtp-quant", mtp, "--group-size", "32", "--link", "copy")
    outcome = quantize(channels, output, *options)
    assert outcome.code == 0, outcome.err
    stored = read_tensors(output / "mtp")
    assert stored[HEAD].equal(read_tensors(channels)["lm_head.weight"])
    outcome = run_program("verify", output, "--source", channels, "--level", "weights", "--quiet")
    assert outcome.code == 0, outcome.out + outcome.err


def test_bf16_of_channels_is_code_times_scale(channels: Path, output: Path) -> None:
    """Of every matrix, eh_proj included, which some conversions have in fp8 too."""
    projection = f"{LAYER}.eh_proj"
    tensors = load_file(channels / "mtp.safetensors")
    name = f"{projection}.weight"
    tensors[name], tensors[f"{name}_scale"] = in_channels(tensors[name])
    save_file(tensors, channels / "mtp.safetensors", metadata={"format": "pt"})
    edit_json(
        channels / "config.json", lambda c: c["quantization_config"]["ignore"].remove(projection)
    )
    outcome = quantize(channels, output, "--base-quant", "bf16", "--mtp-quant", "bf16")
    assert outcome.code == 0, outcome.err
    original, stored = read_tensors(channels), read_tensors(output / "mtp")
    assert not [name for name in stored if name.endswith("_scale")]
    for name in (f"{LAYER}.self_attn.q_proj.weight", f"{projection}.weight"):
        wanted = (original[name].float() * original[f"{name}_scale"].float()).bfloat16()
        assert stored[name].equal(wanted), name


def test_a_projection_that_no_list_names_is_listed(channels: Path, output: Path) -> None:
    """Engines build it as a linear of torch, whatever config.json says."""
    projection = f"{LAYER}.eh_proj"
    assert projection in read_json(channels / "config.json")["quantization_config"]["ignore"]
    edit_json(
        channels / "config.json", lambda c: c["quantization_config"]["ignore"].remove(projection)
    )
    outcome = run_program("verify", channels, "--level", "files", "--engine", "sglang", "--quiet")
    assert outcome.code == 0, outcome.err
    outcome = export(channels, output, "--link", "copy")
    assert outcome.code == 0, outcome.err
    original, stored = read_tensors(channels), read_tensors(output / "mtp")
    assert stored[f"{projection}.weight"].equal(original[f"{projection}.weight"])
    entries = read_json(output / "main/config.json")["quantization_config"]["ignore"]
    assert any(entry.startswith(f"re:{projection}") for entry in entries)
    outcome = run_program("verify", output, "--source", channels, "--level", "weights", "--quiet")
    assert outcome.code == 0, outcome.out + outcome.err


def test_a_projection_that_engines_build_by_the_config_is_listed(tmp_path: Path) -> None:
    """As any linear: Qwen's `fc` by vLLM's class, and MTP projections of native fp8 by no role."""
    dense = write_dense(tmp_path / "dense", config=family_config("qwen3_next"))
    source, output = tmp_path / "source", tmp_path / "output"
    assert quantize(dense, source, "--base-quant", "a8w8_fp8", "--mtp-quant", "a8w8_fp8").code == 0

    def unlist(config: dict[str, Any]) -> None:
        for key in ("modules_to_not_convert", "ignored_layers"):
            config["quantization_config"][key].remove("mtp.fc")

    for part in ("main", "mtp"):
        edit_json(source / part / "config.json", unlist)
    outcome = export(source, output, "--link", "copy")
    assert outcome.code == 0, outcome.err
    for part in ("main", "mtp"):
        quantization = read_json(output / part / "config.json")["quantization_config"]
        assert "mtp.fc" in quantization["modules_to_not_convert"], part
    outcome = run_program("verify", output, "--level", "weights", "--quiet")
    assert outcome.code == 0, outcome.out + outcome.err


def test_the_layer_is_grafted_onto_integers(channels: Path, dense: Path, tmp_path: Path) -> None:
    main, output = tmp_path / "main", tmp_path / "output"
    write(dense, main, "compressed-tensors, int4")
    places = ("--main", main, "--mtp", channels, "--output-dir", output)
    outcome = run_program("graft", *places, "--json", "--quiet")
    assert outcome.code == 0, outcome.err
    assert json.loads(outcome.out)["launch"].keys() == {"vllm", "sglang"}
    outcome = run_program("verify", output, "--level", "weights", "--quiet")
    assert outcome.code == 0, outcome.out + outcome.err


def test_blocks_of_compressed_tensors_are_a_source_too(tmp_path: Path) -> None:
    source, output = tmp_path / "source", tmp_path / "output"
    checkpoint = both("fp8")()
    in_compressed_blocks(checkpoint)
    checkpoint.save(source)
    outcome = export(source, output, "--link", "copy")
    assert outcome.code == 0, outcome.err
    outcome = run_program("verify", output, "--source", source, "--level", "weights", "--quiet")
    assert outcome.code == 0, outcome.out + outcome.err
    again = ("--base-quant", "bf16", "--mtp-quant", "bf16", "--overwrite")
    outcome = quantize(source, output, *again)
    assert outcome.code == 0, outcome.err
    outcome = run_program("verify", output, "--source", source, "--level", "weights", "--quiet")
    assert outcome.code == 0, outcome.out + outcome.err


def test_a_part_cannot_keep_channels(channels: Path, output: Path) -> None:
    refused = quantize(channels, output, "--base-quant", "weight_only_int4", "--group-size", "32")
    assert refused.code == 4 and "precision that no scheme writes" in refused.err


def test_the_head_of_another_model_is_refused(channels: Path, output: Path) -> None:
    tensors = load_file(channels / "mtp.safetensors")
    other = torch.randn(tensors[HEAD].shape, generator=torch.Generator().manual_seed(1))
    tensors[HEAD], tensors[f"{HEAD}_scale"] = in_channels(other)
    save_file(tensors, channels / "mtp.safetensors", metadata={"format": "pt"})
    refused = export(channels, output, "--link", "copy")
    assert refused.code == 3
    assert f"{HEAD} differs from the main model's lm_head.weight" in refused.err
    assert "20 dB or more" in refused.err
    assert export(channels, output, "--link", "copy", "--allow-untied").code == 0


def test_a_copy_without_its_scale_is_refused(channels: Path, output: Path) -> None:
    path = channels / "mtp.safetensors"
    save_file({n: t for n, t in load_file(path).items() if n != f"{HEAD}_scale"}, path)
    refused = export(channels, output)
    assert refused.code == 3
    assert f"{HEAD}_scale: missing, though its weight {HEAD} is there" in refused.err


def test_other_compressed_sources_are_refused(channels: Path, output: Path) -> None:
    def in_int8(config: dict[str, Any]) -> None:
        group = config["quantization_config"]["config_groups"]["group_0"]
        group["weights"] |= {"type": "int"}
        group["format"] = "pack-quantized"

    edit_json(channels / "config.json", in_int8)
    refused = export(channels, output)
    assert refused.code == 4
    assert "in int8_channel is carried into another layout, and not converted" in refused.err


def test_a_tensor_in_the_index_and_beside_it_is_refused(channels: Path, output: Path) -> None:
    file = channels / "mtp.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = load_file(channels / "model.safetensors")["lm_head.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    refused = export(channels, output)
    assert (
        refused.code == 3
        and "that the index does not name repeats tensors of the index" in refused.err
    )
