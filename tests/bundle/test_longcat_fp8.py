"""LongCat-Flash's release in fp8, whose projection of embedding and hidden state is in fp8 too."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from cases import edit_json, export, nightly_but, quantize, read_json, read_tensors, run_program
from faults.small_model import family_config, write_dense, write_fp8
from mtp_kernels.quantize import Fp8Block, dequantize_fp8_block, quantize_fp8_block

PROJECTION = "model.mtp.layers.0.eh_proj"
NAMES = (f"{PROJECTION}.weight", f"{PROJECTION}.weight_scale_inv")


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("longcat") / "dense"
    config = family_config("longcat_flash") | {"q_lora_rank": 32}  # whole groups of nvfp4
    return write_dense(folder, config=config)


@pytest.fixture(scope="module")
def release(dense: Path) -> Path:
    """All linears as this tool stores them in fp8, and the projection too."""
    bundle, folder = write_fp8(dense, dense.with_name("fp8")), dense.with_name("release")
    shutil.copytree(bundle / "main", folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = read_tensors(bundle / "main") | read_tensors(bundle / "mtp")
    block, _ = quantize_fp8_block(tensors[NAMES[0]])
    tensors |= dict(zip(NAMES, (block.codes, block.scale), strict=True))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    def list_less(config: dict[str, Any]) -> None:
        quantization = config["quantization_config"]
        for key in ("modules_to_not_convert", "ignored_layers"):
            assert PROJECTION in quantization[key] and "eh_proj" in quantization[key]
            listed = (name for name in quantization[key] if not name.endswith("eh_proj"))
            quantization[key] = [*listed]

    edit_json(folder / "config.json", list_less)
    return folder


def test_it_is_inspected_and_exported(release: Path, tmp_path: Path) -> None:
    assert run_program("inspect", release).code == 0
    assert run_program("verify", release, "--level", "weights", "--quiet").code == 0
    bundle = tmp_path / "bundle"
    assert export(release, bundle, "--link", "copy", "--target", "vllm", "--quiet").code == 0
    stored, source = read_tensors(bundle / "mtp"), read_tensors(release)
    for name in NAMES:
        assert stored[name].dtype == source[name].dtype and stored[name].equal(source[name])
    assert read_json(bundle / "mtp/config.json") == read_json(release / "config.json")
    outcome = run_program("verify", bundle, "--source", release, "--level", "weights", "--quiet")
    assert outcome.code == 0, outcome.out + outcome.err


@pytest.mark.parametrize(
    "scheme", nightly_but(["weight_only_int8"], ["weight_only_int8", "weight_only_nvfp4"])
)
def test_it_is_quantized(scheme: str, release: Path, tmp_path: Path) -> None:
    """The projection goes the way of attention's linears: into bf16 beside int8, into nvfp4."""
    bundle = tmp_path / "bundle"
    schemes = ("--base-quant", scheme, "--mtp-quant", scheme)
    outcome = quantize(release, bundle, *schemes, "--target", "vllm", "--link", "copy")
    assert outcome.code == 0, outcome.err
    stored, source = read_tensors(bundle / "mtp"), read_tensors(release)
    ignored = read_json(bundle / "main/config.json")["quantization_config"]["ignore"]
    if scheme == "weight_only_int8":
        blocks = Fp8Block(*(source[name] for name in NAMES))
        assert stored[NAMES[0]].equal(dequantize_fp8_block(blocks, torch.bfloat16)[0])
    else:
        assert f"{PROJECTION}.weight_packed" in stored
    assert any(name.endswith("eh_proj$)") for name in ignored) == (scheme == "weight_only_int8")
    assert "re:.*eh_proj$" not in ignored
    outcome = run_program("verify", bundle, "--source", release, "--level", "weights", "--quiet")
    assert outcome.code == 0, outcome.out + outcome.err
