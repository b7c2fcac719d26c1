"""Lists by the names that vLLM's class of a family's drafts has for its modules: bundles have them,
and a list of the tensors' names alone acts on nothing there."""

from __future__ import annotations

from pathlib import Path

import pytest

from cases import edit_json, quantize, run_program
from faults.small_model import family_config, write_dense
from mtp_checkpoints.families import family_of
from mtp_checkpoints.quantization.method import modules_of
from verify.test_foreign_checkpoints import failures, verified
from verify.test_sglang_names import OF_VLLM, write

PAIRS = {
    "int4": ("weight_only_int4", "weight_only_int8"),
    "fp8": ("a8w8_fp8", "a8w8_fp8"),
    "int8": ("weight_only_int8", "weight_only_int8", "--int8-scope", "linears"),
    "nvfp4": ("a4w4_nvfp4", "bf16", "--format", "modelopt"),
}
WRITTEN = [
    *(("longcat_flash", pair) for pair in PAIRS),
    *(("step3p5", pair) for pair in PAIRS),
    *(("bailing_hybrid", pair) for pair in PAIRS),
    *((model_type, "nvfp4") for model_type in ("mimo", "ernie4_5_moe", "glm_ocr")),
    ("BailingMoeV2_5ForCausalLM", "int4"),
    *(("mimo_v2_flash", pair) for pair in PAIRS),  # whose o_proj stays as it is
]


@pytest.mark.parametrize(("model_type", "pair"), WRITTEN)
def test_bundles_have_its_names(tmp_path: Path, model_type: str, pair: str) -> None:
    config = family_config(model_type)
    if model_type == "longcat_flash":
        config = config | {"q_lora_rank": 32}  # whole groups
    source, bundle = write_dense(tmp_path / "dense", config=config), tmp_path / "bundle"
    base, mtp, *more = PAIRS[pair]
    schemes = ("--base-quant", base, "--mtp-quant", mtp, "--group-size", "32", *more)
    made = quantize(source, bundle, *schemes, "--target", "vllm", "--link", "copy")
    assert made.code == 0, made.err
    outcome = run_program("verify", bundle, "--level", "files", "--quiet")
    assert outcome.code == 0, outcome.err


@pytest.mark.parametrize(
    ("model_type", "own"),
    [
        ("longcat_flash", {"eh_proj", "model.layers.4.mlp.down_proj"}),
        ("BailingMoeV2_5ForCausalLM", {"model.layers.4.self_attn.o_proj"}),
    ],
)
def test_the_list_must_have_its_names(tmp_path: Path, model_type: str, own: set[str]) -> None:
    folder = write(model_type, tmp_path, mtp=False, method="fp8")
    family = family_of(family_config(model_type))
    linears = (spec for spec in family.mtp_tensors.values() if spec.is_linear_or_projection)
    names = modules_of(linears)
    listed = dict.fromkeys(("modules_to_not_convert", "ignored_layers"), names)
    edit_json(folder / "config.json", lambda c: c["quantization_config"].update(listed))
    _, items = verified(folder)
    assert OF_VLLM in failures(items)
    lists = items[OF_VLLM]["data"]["lists"]
    assert own <= {*lists["ignored_layers"]}
    more = {key: [*names, *entries] for key, entries in lists.items()}
    edit_json(folder / "config.json", lambda c: c["quantization_config"].update(more))
    _, items = verified(folder)
    assert OF_VLLM in items and OF_VLLM not in failures(items)


def test_gptq_without_a_list_is_told_by_names_that_vllm_maps(tmp_path: Path) -> None:
    """The tensors' too, of Ling's."""
    _, items = verified(write("bailing_hybrid", tmp_path, mtp=True, method="gptq"))
    assert OF_VLLM in items and OF_VLLM not in failures(items)


@pytest.mark.parametrize("model_type", ["ernie4_5_moe", "mimo"])
def test_gptq_without_a_list_is_told_by_its_names(tmp_path: Path, model_type: str) -> None:
    """Which no tensor of this draft has: vLLM builds it unquantized, whatever it is stored as."""
    folder = write(model_type, tmp_path / "both", mtp=True, method="gptq")
    _, items = verified(folder, "--engine", "vllm")
    assert failures(items) == {OF_VLLM}
    assert "so that it builds the draft unquantized" in items[OF_VLLM]["cause"]
    blocks = {"modules_in_block_to_quantize": ["self_attn", "mlp"]}
    edit_json(folder / "config.json", lambda c: c["quantization_config"].update(blocks))
    _, items = verified(folder, "--engine", "vllm")
    assert failures(items) == set()
    folder = write(model_type, tmp_path / "main", mtp=False, method="gptq")
    edit_json(
        folder / "config.json", lambda c: c["quantization_config"].pop("modules_to_not_convert")
    )
    _, items = verified(folder, "--engine", "vllm")
    assert failures(items) == set()
