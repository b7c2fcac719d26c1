"""Grafts whose lists have the names that vLLM's class has for a family's draft, and grafts in the
place of an MTP layer under other names."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from cases import edit_json, run_program
from mtp_checkpoints.families import family_of
from mtp_checkpoints.quantization.methods.modelopt import flattened
from mtp_checkpoints.tensors.bundle_folder import open_checkpoint
from verify.foreign import GLM, GLM_MTP, Config, rewritten
from verify.test_foreign_checkpoints import failures, verified
from verify.test_sglang_names import OF_VLLM, write

# Whose layer, modules or projection have another name in vLLM than in the files.
OTHERS = ("mimo", "ernie4_5_moe", "glm_ocr", "step3p5")
CASES = [(model_type, method) for model_type in OTHERS for method in ("awq", "fp8")]
CASES += [("longcat_flash", method) for method in ("fp8", "modelopt fp8, in a file")]
CASES += [("hy_v4", "fp8")]  # fused experts are asked for too


@pytest.mark.parametrize(("model_type", "method"), CASES)
def test_the_list_of_a_graft_has_the_names_of_vllm(
    tmp_path: Path, model_type: str, method: str
) -> None:
    folder = write(model_type, tmp_path, mtp=True, method=method)
    layer_of = family_of(open_checkpoint(folder).config).mtp_layer_of
    stored = load_file(folder / "model.safetensors")
    kept = {name: one for name, one in stored.items() if layer_of(name) is None}
    assert len(kept) < len(stored)
    save_file(kept, folder / "model.safetensors")
    if method.startswith("modelopt"):
        edit_json(folder / "config.json", _as_in_config)
    bundle = tmp_path / "bundle"
    places = ("--main", folder, "--mtp", tmp_path / "dense", "--output-dir", bundle)
    outcome = run_program("graft", *places, "--quiet")
    assert outcome.code == 0, outcome.err
    _, items = verified(bundle, "--engine", "vllm")
    assert failures(items) == set()
    if method.startswith("modelopt"):  # whose draft has a config that says nothing of it
        edit_json(bundle / "main" / "config.json", _without_projection)
        _, items = verified(bundle, "--engine", "vllm")
        assert "eh_proj is stored unquantized" in items[OF_VLLM]["cause"]


def _as_in_config(config: Config) -> None:
    config["quantization_config"] = flattened(config["quantization_config"])


def _without_projection(config: Config) -> None:
    quantization = config["quantization_config"]
    kept = [entry for entry in quantization["ignore"] if "eh_proj" not in entry]
    assert len(kept) < len(quantization["ignore"])
    quantization["ignore"] = kept


@pytest.mark.parametrize("other", ["model.nextn_layers.0.", "model.language_model.layers.3."])
def test_a_layer_under_other_names_is_replaced(tmp_path: Path, other: str) -> None:
    folder = rewritten(
        GLM,
        tmp_path / "renamed",
        lambda stored: {name.replace(GLM_MTP, other): one for name, one in stored.items()},
    )
    places = ("--main", folder, "--mtp", GLM, "--output-dir", tmp_path / "bundle")
    refused = run_program("graft", *places, "--quiet")
    assert refused.code == 3 and "has an MTP layer already" in refused.err
    outcome = run_program("graft", *places, "--replace", "--quiet")
    assert outcome.code == 0, outcome.err
    main = open_checkpoint(tmp_path / "bundle" / "main").tensors
    assert main and not any(name.startswith(other) for name in main)
    _, items = verified(tmp_path / "bundle")
    assert failures(items) == set()
