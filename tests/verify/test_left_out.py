"""Lists that leave modules out of quantization: what they lack for the MTP module that is stored,
and the entry that is one too many."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantized_by_others import METHODS
from verify.foreign import (
    GLM,
    GLM_MTP,
    Config,
    Tensors,
    mtp_left_out,
    quantized,
    rewritten,
)
from verify.test_foreign_checkpoints import failures, verified

ITEM = "mtp: left out of quantization as stored"
# The key to add to, and the entry, of an unquantized MTP layer under each method.
LACKS = {
    "auto-round": r"^model\.layers\.3(\..*)?$ to extra_config",
    "compressed-tensors, int8": r"re:model.layers.3(\..*)?$ to ignore",
    "fp8": "model.layers.3 to modules_to_not_convert",
    "modelopt fp8, in a file": "model.layers.3* to ignore",
}


@pytest.mark.parametrize("method", LACKS)
def test_the_entry_that_lacks_is_named(tmp_path: Path, method: str) -> None:
    outcome, items = verified(quantized(GLM, tmp_path / "main", method))
    assert (outcome.code, failures(items)) == (7, {ITEM})
    assert "stored unquantized" in items[ITEM]["cause"]
    assert f"add {LACKS[method]}" in items[ITEM]["cause"]


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_vllm_finds_by_its_tensors_what_no_list_names(tmp_path: Path, method: str) -> None:
    outcome, items = verified(quantized(GLM, tmp_path / "main", method))
    assert (outcome.code, failures(items)) == (7, {"mtp: precision as SGLang reads it"})
    assert items[ITEM]["status"] == "pass"


LISTED = ("awq", "gptq", "auto-round", "compressed-tensors, int4", "fp8", "modelopt nvfp4")


@pytest.mark.parametrize("method", LISTED)
def test_a_module_that_is_left_out_as_it_is_stored_passes(tmp_path: Path, method: str) -> None:
    outcome, items = verified(quantized(GLM, tmp_path / "main", method, mtp_left_out))
    assert failures(items) <= {"mtp: precision as SGLang reads it"}, outcome.err
    assert items[ITEM]["status"] == "pass"


def test_the_entry_that_is_too_many_is_named(tmp_path: Path) -> None:
    def quantize(fields: Config) -> None:
        fields["quantization_config"] = METHODS["fp8"].config | {
            "modules_to_not_convert": ["lm_head", "model.layers.3", "shared_head"]
        }

    source = quantized(GLM, tmp_path / "source", "fp8")

    def renamed(stored: Tensors) -> Tensors:
        """Main layer 2 in the place of the MTP layer's own linears."""
        main = "model.layers.2."
        return stored | {
            name.replace(main, GLM_MTP): tensor.clone()
            for name, tensor in stored.items()
            if name.startswith(main)
        }

    folder = rewritten(source, tmp_path / "many", renamed, quantize)
    outcome, items = verified(folder)
    assert outcome.code == 7
    assert "stored quantized" in items[ITEM]["cause"]
    assert "(model.layers.3 in modules_to_not_convert)" in items[ITEM]["cause"]
