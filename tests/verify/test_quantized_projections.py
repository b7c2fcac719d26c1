"""Projections of MTP modules that are stored quantized: some classes of engines build them by the
config as any linear, and others never do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from cases import edit_json, read_tensors
from verify.test_foreign_checkpoints import failures, verified
from verify.test_sglang_names import LEFT_OUT, OF_SGLANG, OF_VLLM, write

# The item that fails, and which engines it says build the projection unquantized.
BUILT_PLAIN = {
    "glm4_moe": (LEFT_OUT, "vLLM and SGLang build it"),
    "pangu_ultra_moe": (LEFT_OUT, "vLLM builds it"),
    "qwen3_moe": (LEFT_OUT, "SGLang builds it"),
    "qwen3_5": (OF_SGLANG, "SGLang builds it"),
    "exaone_moe": (OF_SGLANG, "SGLang builds it"),
}


@pytest.mark.parametrize("model_type", BUILT_PLAIN)
def test_the_engines_are_named_that_build_it_plain(tmp_path: Path, model_type: str) -> None:
    _, items = verified(write(model_type, tmp_path, mtp=True, method="fp8", projections=True))
    (failed, words) = BUILT_PLAIN[model_type]
    assert failures(items) == {failed}
    assert f" is stored quantized, and {words} as an unquantized linear: " in items[failed]["cause"]


@pytest.mark.parametrize("method", ["fp8", "awq", "compressed-tensors, int4"])
@pytest.mark.parametrize("model_type", ["bailing_moe", "exaone4_5"])
def test_an_engine_that_builds_it_by_the_config_reads_it(
    tmp_path: Path, model_type: str, method: str
) -> None:
    """The only one that has these models."""
    folder = write(model_type, tmp_path, mtp=True, method=method, projections=True)
    outcome, items = verified(folder)
    assert (failures(items), outcome.code) == (set(), 0)


def test_an_entry_that_leaves_it_out_is_told(tmp_path: Path) -> None:
    folder = write("exaone4_5", tmp_path, mtp=True, projections=True)
    edit_json(
        folder / "config.json",
        lambda c: c["quantization_config"].update(modules_to_not_convert=["mtp.fc"]),
    )
    _, items = verified(folder)
    assert "mtp.fc in modules_to_not_convert" in items[LEFT_OUT]["cause"]


def test_a_linear_that_vllm_builds_plain(tmp_path: Path) -> None:
    """MiMo-V2's `o_proj`, which SGLang builds by the config."""
    _, items = verified(write("mimo_v2_flash", tmp_path / "quantized", mtp=True, method="fp8"))
    assert failures(items) == {OF_VLLM}
    words = "model.mtp.layers.0.self_attn.o_proj is stored quantized, and vLLM builds it as an"
    assert items[OF_VLLM]["cause"].startswith(words)
    folder = write("mimo_v2_flash", tmp_path / "plain", mtp=True, method="fp8")
    stored = load_file(folder / "model.safetensors")
    ends = re.compile(r"model\.mtp\..*self_attn\.o_proj\.weight(_scale_inv)?")
    own = {name: one for name, one in stored.items() if not ends.fullmatch(name)}
    dense = read_tensors(tmp_path / "plain/dense")
    own |= {name: one for name, one in dense.items() if ends.fullmatch(name)}
    assert "model.mtp.layers.0.self_attn.o_proj.weight" in own
    save_file(own, folder / "model.safetensors")
    _, items = verified(folder)
    assert OF_VLLM in items and OF_VLLM not in failures(items)


@pytest.mark.parametrize(("model_type", "passes"), [("qwen3_5", True), ("exaone_moe", False)])
def test_an_unquantized_one_beside_nvfp4(tmp_path: Path, model_type: str, passes: bool) -> None:
    """vLLM's classes of Qwen alone build it so though no list of ModelOpt's leaves it out."""
    folder = write(model_type, tmp_path, mtp=True, method="modelopt nvfp4")
    edit_json(
        folder / "config.json",
        lambda c: c["quantization_config"].update(ignore=["*attn*", "lm_head"]),
    )
    _, items = verified(folder)
    assert (OF_VLLM in items, OF_VLLM not in failures(items)) == (True, passes)
    if not passes:
        assert "mtp.fc is stored unquantized and left out by no list" in items[OF_VLLM]["cause"]
