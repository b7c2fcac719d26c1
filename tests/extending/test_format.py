"""A new number format is one file, with a codec in torch, and one line in FORMATS: no kernel,
config writer, engine or check of verify knows it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cases import WHOLE_TILES, export, make_checkpoint, read_json, run_program
from extending.toy_format import LAYOUT, MIXED, SCHEME, TOY, Int6Channel
from mtp_checkpoints.families.base import Role
from mtp_checkpoints.formats import FORMATS
from mtp_checkpoints.quantization.stored import stored_model
from mtp_checkpoints.tensors.reader import Checkpoint
from mtp_export.bundle.build import run_bundle
from mtp_export.bundle.options import BundleOptions
from mtp_export.bundle.quantize import QuantizeOptions, plan_quantize
from mtp_export.schemes import SCHEMES
from mtp_export.schemes.scheme import Scheme


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The format, and schemes with it, in the registries."""
    monkeypatch.setitem(FORMATS, TOY, Int6Channel)
    for scheme in (SCHEME, MIXED):
        monkeypatch.setitem(SCHEMES, scheme.name, scheme)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a source, and a bundle in the format that the command has made."""
    folder = tmp_path_factory.mktemp("made")
    source = make_checkpoint(folder / "source", WHOLE_TILES)
    assert export(source, folder / "exported").code == 0
    places = ("--input-dir", str(folder / "exported"), "--output-dir", str(folder / "bundle"))
    pair = ("--base-quant", SCHEME.name, "--mtp-quant", SCHEME.name, "--allow-untested-pair")
    done = subprocess.run(
        [sys.executable, "-m", "extending.toy_format", "quantize", *places, *pair],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return folder


def _quantize(source: Path, output: Path, scheme: Scheme, target: str = "hf") -> None:
    # Not as a command of this process, which is made with the schemes of the first time.
    options = QuantizeOptions(
        BundleOptions(source, output, target=target),
        base_quant=scheme.name,
        mtp_quant=scheme.name,
        allow_untested_pair=True,
    )
    run_bundle(plan_quantize(options), lambda count: None)


def test_a_new_format_is_written_read_verified_and_run(made: Path, tmp_path: Path) -> None:
    source, bundle = made / "source", made / "bundle"
    config = read_json(bundle / "main/config.json")
    assert config["quantization_config"]["format"] == LAYOUT
    stored = stored_model(config)
    experts = [one for one in stored.main.weights.values() if one.weight.role is Role.ROUTED_EXPERT]
    assert {one.format for one in experts} == {Int6Channel()}
    assert stored.main.tensors.keys() == Checkpoint.open(bundle / "main").tensors.keys()
    verified = run_program("verify", bundle, "--source", source, "--level", "weights", "--verbose")
    assert verified.code == 0, verified.out + verified.err
    assert "≥ 25 dB" in verified.out
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt_token_ids": [3, 1, 4]}\n')
    texts = run_program("generate", bundle, "--prompts", prompts, "--max-new-tokens", 4)
    assert texts.code == 0, texts.out + texts.err


@pytest.mark.parametrize("target", ["vllm", "sglang"])
def test_a_new_format_beside_fp8(target: str, tmp_path: Path, output: Path) -> None:
    """It has a group of its own, beside fp8 as each dialect describes that."""
    source = make_checkpoint(tmp_path / "source", WHOLE_TILES)
    _quantize(source, output, MIXED, target)
    config = read_json(output / "main/config.json")["quantization_config"]
    layouts = {group["format"] for group in config["config_groups"].values()}
    assert layouts == ({LAYOUT} if target == "sglang" else {LAYOUT, "float-quantized"})
    verified = run_program("verify", output, "--level", "files")
    assert verified.code == 0, verified.out + verified.err


def test_a_known_bug_of_a_new_format_is_named(made: Path, tmp_path: Path) -> None:
    from faults import planting

    def signed(codes: torch.Tensor) -> torch.Tensor:
        return torch.where(codes < 0, -codes | -128, codes)

    name = "model.layers.1.mlp.experts.1.up_proj.weight_int6"
    bundle = Path(shutil.copytree(made / "bundle", tmp_path / "bundle"))
    planting.change(bundle / "main", name, signed)
    options = ("--source", made / "source", "--level", "weights")
    verified = run_program("verify", bundle, *options)
    assert verified.code == 7
    assert "two's complement was taken for sign and magnitude" in verified.out
