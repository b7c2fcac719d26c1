"""Lists by the names that SGLang's class of a family's drafts has for its modules, and classes that
build drafts unquantized."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from cases import edit_json
from faults.small_model import family_config, write_dense
from mtp_checkpoints.families import family_of
from mtp_checkpoints.families.base import Role
from quantized_by_others import METHODS
from verify.foreign import INDEX, Tensors, rewritten
from verify.test_foreign_checkpoints import failures, verified

OF_VLLM, OF_SGLANG = (f"mtp: precision as {engine} reads it" for engine in ("vLLM", "SGLang"))
LEFT_OUT = "mtp: left out of quantization as stored"
# The entry that leaves the first MTP layer out for SGLang.
LAYERS = {
    "mimo_v2_flash": "model.decoder",
    "ernie4_5_moe": "model.mtp_block",
    "bailing_moe": "model.decoder",
    "hy_v3": "model.decoder",
    "bailing_hybrid": "",  # which keeps the names of the tensors
}


def write(
    model_type: str, folder: Path, *, mtp: bool, method: str = "awq", projections: bool = False
) -> Path:
    """A checkpoint of a family by a method, its MTP layers quantized too or left out by their
    names, and the projections too where they are asked for."""
    config, how = family_config(model_type), METHODS[method]
    family = family_of(config)
    every = (spec for spec in family.tensors.values() if re.match(how.covers, spec.name))
    linears = [
        spec
        for spec in every
        if spec.is_linear_weight or (projections and spec.role is Role.MTP_PROJECTION)
    ]
    names = [name for one in family.mtp for name in (one.layer.prefix, one.modules.projection)]

    def change(stored: Tensors) -> None:
        for spec in linears:
            if spec.mtp_layer is None or mtp:
                parts, _ = how.encode(stored.pop(spec.name).float())
                for last, one in parts.items():
                    stored[f"{spec.module}.{last}"] = one.contiguous()

    dense = write_dense(folder / "dense", config=config)
    (dense / INDEX).unlink()
    quantization: dict[str, Any] = dict(how.config)
    if not mtp:
        quantization["modules_to_not_convert"] = names
    return rewritten(
        dense, folder / "own", change, lambda c: c.update(quantization_config=quantization)
    )


@pytest.mark.parametrize("model_type", LAYERS)
def test_the_list_must_have_its_names(tmp_path: Path, model_type: str) -> None:
    folder, layer = write(model_type, tmp_path, mtp=False), LAYERS[model_type]
    _, items = verified(folder)
    family = family_of(family_config(model_type))
    of_vllm = [family.vllm.layer] if family.vllm.layer else []  # Ernie's
    wanted = {OF_SGLANG: layer, OF_VLLM: of_vllm}
    assert failures(items) == {item for item, entry in wanted.items() if entry}
    if layer:
        edit_json(
            folder / "config.json",
            lambda c: c["quantization_config"]["modules_to_not_convert"].extend([layer, *of_vllm]),
        )
        cause = items[OF_SGLANG]["cause"]
        known = family.sglang.layer
        assert cause.startswith(f"SGLang knows the draft's layer as {known}")
        assert layer in items[OF_SGLANG]["data"]["lists"]["modules_to_not_convert"]
        outcome, items = verified(folder)
        assert (failures(items), outcome.code) == (set(), 0)


@pytest.mark.parametrize("model_type", ["exaone_moe", "mimo"])
def test_a_layer_by_the_name_of_a_main_one_or_none_has_no_entry(
    tmp_path: Path, model_type: str
) -> None:
    """Which would leave a main layer out, too."""
    _, items = verified(write(model_type, tmp_path, mtp=False))
    own = {OF_VLLM} if model_type == "mimo" else set()  # where both have another name
    assert failures(items) == {OF_SGLANG} | own
    assert "lists" not in items[OF_SGLANG]["data"]


@pytest.mark.parametrize("entries", [[], ["mtp.layers.0"]])
def test_lists_are_repaired_for_the_others(tmp_path: Path, entries: list[str]) -> None:
    """Without the entries that SGLang lacks, which are a main layer's names."""
    folder = write("exaone_moe", tmp_path, mtp=True, method="fp8")
    edit_json(folder / "config.json", lambda c: c["quantization_config"].update(listed(entries)))
    plain = write("exaone_moe", tmp_path / "plain", mtp=False)
    stored = load_file(plain / "model.safetensors")
    own = {n: t for n, t in load_file(folder / "model.safetensors").items() if "mtp." not in n}
    own |= {name: tensor for name, tensor in stored.items() if "mtp." in name}
    save_file(own, folder / "model.safetensors")
    _, items = verified(folder)
    named = OF_VLLM if entries else LEFT_OUT
    cause, lists = items[named]["cause"], items[named]["data"]["lists"]
    assert "That alone mends nothing for SGLang: SGLang knows the draft's layer as" in cause
    assert ("(mtp.layers.0 in modules_to_not_convert, like 1 more" in cause) is bool(entries)
    assert "mtp.fc" in lists["ignored_layers"] and not {*entries, "mtp.fc"} - {
        *lists["ignored_layers"]
    }
    edit_json(folder / "config.json", lambda c: c["quantization_config"].update(lists))
    _, items = verified(folder)
    assert failures(items) == {OF_SGLANG}


def test_a_projection_that_no_list_of_gptq_names(tmp_path: Path) -> None:
    """vLLM finds by the tensors that `mtp.fc` has no codes, as of any other linear."""
    folder = write("exaone_moe", tmp_path, mtp=True, method="gptq")
    outcome, items = verified(folder)
    assert (failures(items), outcome.code) == (set(), 0)
    blocks = {"modules_in_block_to_quantize": ["self_attn", "mlp", "mtp.fc"]}
    edit_json(folder / "config.json", lambda c: c["quantization_config"].update(blocks))
    _, items = verified(folder)
    assert failures(items) == {OF_VLLM}
    assert "mtp.fc is stored unquantized" in items[OF_VLLM]["cause"]


def listed(entries: list[str]) -> dict[str, list[str]]:
    """Both of the lists of native fp8."""
    return {"modules_to_not_convert": entries, "ignored_layers": entries}


def test_a_class_that_takes_no_config(tmp_path: Path) -> None:
    """SGLang's of Step-3.5 gives its decoder layer none."""
    _, items = verified(write("step3p5", tmp_path / "quantized", mtp=True))
    assert failures(items) == {OF_SGLANG}
    words = "SGLang builds every draft of this model unquantized: "
    assert items[OF_SGLANG]["cause"].startswith(words)
    _, items = verified(write("step3p5", tmp_path / "plain", mtp=False))
    assert failures(items) == set()


@pytest.mark.parametrize(("model_type", "passes"), [("qwen3_moe", True), ("glm4_moe", False)])
def test_drafts_beside_nvfp4(tmp_path: Path, model_type: str, passes: bool) -> None:
    """Some of SGLang's classes alone build them unquantized."""
    _, items = verified(write(model_type, tmp_path, mtp=True, method="modelopt nvfp4"))
    assert failures(items) == (set() if passes else {OF_SGLANG})
