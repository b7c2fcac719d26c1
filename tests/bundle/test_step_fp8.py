"""Step-3.5's release in fp8, whose fused experts are in fp8 too: codes and scales of all experts of
a layer in one tensor each."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from cases import edit_json, export, quantize, read_json, read_tensors, run_program
from faults.small_model import family_config, write_dense
from mtp_checkpoints.families import family_of
from mtp_kernels.quantize import Fp8Block, dequantize_fp8_block, quantize_fp8_block
from mtp_runtime import LLM, SamplingParams

FUSED = "model.layers.1.moe.gate_proj.weight"
NATIVE = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
}


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every linear in fp8, fused experts expert by expert; of more than a block each."""
    config = family_config("step3p5") | {"moe_intermediate_size": 192}
    dense = write_dense(tmp_path_factory.mktemp("step") / "dense", config=config)
    folder, family = dense.with_name("release"), family_of(config)
    shutil.copytree(dense, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = dict[str, torch.Tensor]()
    for name, tensor in read_tensors(dense).items():
        fused = tensor.dim() == 3
        if not fused and not family.tensors[name].is_linear_weight:
            tensors[name] = tensor
            continue
        blocks = [quantize_fp8_block(one)[0] for one in (tensor if fused else [tensor])]
        for end, parts in (
            ("", [block.codes for block in blocks]),
            ("_scale_inv", [block.scale for block in blocks]),
        ):
            tensors[f"{name}{end}"] = torch.stack(parts) if fused else parts[0]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    plain = list(family.plain_matrices)

    def describe(config: dict[str, Any]) -> None:
        config["quantization_config"] = NATIVE | {"modules_to_not_convert": plain}

    edit_json(folder / "config.json", describe)
    return folder


def test_it_is_inspected_and_exported(release: Path, tmp_path: Path) -> None:
    assert read_tensors(release)[f"{FUSED}_scale_inv"].shape[1:] == (2, 1)
    assert run_program("inspect", release).code == 0
    bundle = tmp_path / "bundle"
    outcome = export(release, bundle, "--link", "copy", "--target", "vllm", "--quiet")
    assert outcome.code == 0, outcome.err
    stored = read_tensors(bundle / "main") | read_tensors(bundle / "mtp")
    source = read_tensors(release)
    copy = stored.pop("model.mtp.embed_tokens.weight")  # engines fail on a draft without one
    assert copy.equal(source["model.embed_tokens.weight"])
    assert stored.keys() == source.keys()
    assert all(one.equal(source[name]) for name, one in stored.items())
    words = ("verify", bundle, "--source", release, "--level", "weights", "--quiet")
    outcome = run_program(*words, "--html", tmp_path / "report.html")
    assert outcome.code == 0, outcome.out + outcome.err
    page = (tmp_path / "report.html").read_text()
    assert "no fault in files and weights for vLLM" in page
    assert "the bundle was made with --target vllm" in page
    assert "vllm serve" in page and "sglang.launch_server" not in page
    outcome = run_program(*words, "--engine", "sglang")
    assert outcome.code == 7
    assert "SGLang builds every draft of this model unquantized" in outcome.err


def test_it_is_quantized(release: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    schemes = ("--base-quant", "bf16", "--mtp-quant", "bf16")
    outcome = quantize(release, bundle, *schemes, "--target", "vllm", "--link", "copy")
    assert outcome.code == 0, outcome.err
    stored, source = read_tensors(bundle / "main"), read_tensors(release)
    for expert, codes in enumerate(source[FUSED]):
        blocks = Fp8Block(codes, source[f"{FUSED}_scale_inv"][expert])
        wanted, _ = dequantize_fp8_block(blocks, torch.bfloat16)
        assert stored[f"model.layers.1.moe.experts.{expert}.gate_proj.weight"].equal(wanted)
    assert "quantization_config" not in read_json(bundle / "main/config.json")
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    one, other = (
        LLM(path, speculate_method="mtp").generate([[5, 6, 7]], params)[0].token_ids
        for path in (release, bundle)
    )
    assert one == other, "the runtime reads the release itself"
    outcome = run_program("verify", bundle, "--source", release, "--level", "weights", "--quiet")
    assert outcome.code == 0, outcome.out + outcome.err
