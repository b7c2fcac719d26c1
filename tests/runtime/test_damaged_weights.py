"""Damaged weights: the refusal names the tensor, its file, and the command that tells the repair,
whichever way the layer holds its weight."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch

from cases import export, run_program
from faults import planting
from mtp_checkpoints.errors import InvalidInputError
from mtp_runtime.models.load import LoadOptions, load_model
from runtime.harness import Walk

EXPERTS, ATTENTION = "model.layers.2.mlp.experts.", "model.layers.1.self_attn.q_a_proj."
HELD = {
    "compiled": LoadOptions(),
    "by torch": LoadOptions(dequantize_at_load=False),
    "read when they are used": LoadOptions(expert_bytes=1 << 22),
}


@pytest.fixture(scope="module")
def fp8_bundle(pristine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good bundle in fp8 blocks, of few layers."""
    folder = tmp_path_factory.mktemp("fp8") / "bundle"
    assert export(pristine, folder, "--link", "copy", "--quiet").code == 0
    return folder


def damaged(fp8_bundle: Path, folder: Path, module: str) -> Path:
    """A bundle with scales that are zero."""
    bundle = Path(shutil.copytree(fp8_bundle, folder / "a bundle"))
    scales = planting.names(bundle / "main", module, "weight_scale_inv")
    planting.change_all(bundle / "main", scales, torch.zeros_like)
    return bundle


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("module", [ATTENTION, EXPERTS])
def test_the_tensor_and_its_file_are_named(
    module: str, held: str, fp8_bundle: Path, tmp_path: Path
) -> None:
    bundle = damaged(fp8_bundle, tmp_path, module)
    with pytest.raises(InvalidInputError) as refused:
        Walk(load_model(bundle, HELD[held]).model).feed(range(2, 60))
    said = str(refused.value)
    named = re.match(r"Tensor (\S+) cannot be dequantized \((.+)\)\. Found fp8 block scale", said)
    assert named is not None and named[1].startswith(module), said
    main = bundle / "main"
    assert Path(named[2]) == main / planting.weight_map(main)[named[1]]
    assert f"by mtp-export verify '{bundle}' --level weights." in said


def test_generate_ends_with_it(fp8_bundle: Path, tmp_path: Path) -> None:
    bundle = damaged(fp8_bundle, tmp_path, EXPERTS)
    outcome = run_program("generate", bundle, "--prompt", "a", "--max-new-tokens", "4")
    assert outcome.code == 3 and outcome.err.count("cannot be dequantized") == 1
