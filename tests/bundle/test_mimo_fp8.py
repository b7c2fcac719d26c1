"""MiMo-V2's release in fp8: its joined projection is stored rank by rank, in blocks of each."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from cases import export, quantize, read_json, read_tensors, run_program
from faults.small_model import family_config, write_dense, write_fp8
from mtp_kernels.quantize import Fp8Block, dequantize_fp8_block, quantize_fp8_block

RANKS, BLOCK = 2, 128
SIZES = {"head_dim": 32, "v_head_dim": 16, "swa_head_dim": 32, "swa_v_head_dim": 16}
# 352 rows in layers of either kind of 176 per rank: two blocks each, the second of 48 rows.
LAYERS = ("model.layers.0.self_attn", "model.mtp.layers.0.self_attn")


def in_chunks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of a weight in blocks that begin anew with every rank."""
    blocks = [quantize_fp8_block(chunk.contiguous())[0] for chunk in weight.chunk(RANKS)]
    return torch.cat([b.codes for b in blocks]), torch.cat([b.scale for b in blocks])


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = family_config("mimo_v2") | SIZES | {"swa_num_key_value_heads": RANKS}
    assert config["num_key_value_heads"] == RANKS
    return write_dense(tmp_path_factory.mktemp("mimo") / "dense", config=config)


@pytest.fixture(scope="module")
def bundle(dense: Path) -> Path:
    """The model in fp8, as this tool writes it."""
    return write_fp8(dense, dense.with_name("fp8"))


@pytest.fixture(scope="module")
def release(dense: Path, bundle: Path) -> Path:
    """The same, its joined projections in blocks that were made rank by rank."""
    folder = dense.with_name("release")
    shutil.copytree(bundle / "main", folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = read_tensors(bundle / "main") | read_tensors(bundle / "mtp")
    joined = {name: one for name, one in read_tensors(dense).items() if "qkv_proj" in name}
    assert {f"{layer}.qkv_proj.weight" for layer in LAYERS} <= joined.keys()
    for name, weight in joined.items():
        tensors[name], tensors[f"{name}_scale_inv"] = in_chunks(weight)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_blocks_begin_anew_with_every_rank(release: Path, bundle: Path) -> None:
    """As the release has them, so has what this tool quantizes, bit for bit."""
    theirs = read_tensors(release)
    ours = read_tensors(bundle / "main") | read_tensors(bundle / "mtp")
    for layer in LAYERS:
        scale = f"{layer}.qkv_proj.weight_scale_inv"
        assert theirs[scale].shape[0] == 2 * RANKS > -(-352 // BLOCK)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        same = ours[name].view(torch.uint8), tensor.view(torch.uint8)
        assert same[0].equal(same[1]), name


@pytest.mark.nightly
def test_it_is_inspected_and_exported(release: Path, tmp_path: Path) -> None:
    assert run_program("inspect", release).code == 0
    assert run_program("verify", release, "--level", "weights", "--quiet").code == 0
    output = tmp_path / "bundle"
    assert export(release, output, "--link", "copy", "--target", "vllm", "--quiet").code == 0
    stored, source = read_tensors(output / "mtp"), read_tensors(release)
    assert all(tensor.equal(source[name]) for name, tensor in stored.items())
    assert read_json(output / "mtp/config.json") == read_json(release / "config.json")


def test_it_is_quantized_from(release: Path, tmp_path: Path) -> None:
    """Every rank's rows by its own scales."""
    output = tmp_path / "bundle"
    options = ("--base-quant", "bf16", "--mtp-quant", "bf16", "--allow-untested-pair")
    assert quantize(release, output, *options, "--link", "copy").code == 0
    source = read_tensors(release)
    stored = read_tensors(output / "main") | read_tensors(output / "mtp")
    for layer in LAYERS:
        name = f"{layer}.qkv_proj.weight"
        chunks = zip(
            source[name].chunk(RANKS), source[f"{name}_scale_inv"].chunk(RANKS), strict=True
        )
        wanted = [dequantize_fp8_block(Fp8Block(*own), torch.bfloat16)[0] for own in chunks]
        assert stored[name].equal(torch.cat(wanted))
    outcome = run_program("verify", output, "--source", release, "--level", "weights", "--quiet")
    assert outcome.code == 0, outcome.out + outcome.err
