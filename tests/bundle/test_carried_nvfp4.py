"""quantize of checkpoints in nvfp4: carried into the other layout, with the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.entrypoints.convert.converters.modelopt_nvfp4 import ModelOptNvfp4Converter

from calibrate.test_calibration import verify_weights
from cases import nightly_but, quantize, read_json, read_tensors
from faults import planting
from runtime.checkpoints import SMALL, write_checkpoint

CONFIG: dict[str, Any] = SMALL | {
    "torch_dtype": "bfloat16",
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "q_lora_rank": 32,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_group": 2,
}
SCHEMES = ("weight_only_nvfp4", "a4w4_nvfp4")
MODELOPT = ("--format", "modelopt")
INT8 = "weight_only_int8"
MATRIX = "weight_global_scale"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("source") / "model", CONFIG)


def made(source: Path, output: Path, scheme: str, *options: str) -> Path:
    pair = ("--base-quant", scheme, "--mtp-quant", "bf16", "--quiet")
    outcome = quantize(source, output, *pair, *options)
    assert outcome.code == 0, outcome.err
    return output


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("scheme", nightly_but(["a4w4_nvfp4"], SCHEMES))
def test_it_is_carried_there_and_back(scheme: str, source: Path, tmp_path: Path) -> None:
    """Back as compressed-tensors' own converter has it; verify passes it beside its source."""
    packed = made(source, tmp_path / "packed", scheme)
    other = made(packed, tmp_path / "modelopt", scheme, *MODELOPT)
    back = made(other, tmp_path / "back", scheme)
    before, found, after = (read_tensors(b / "main") for b in (packed, other, back))
    own = [name for name in before if name.endswith(".weight_packed")]
    assert len(own) > 40
    for name in own:
        module = name.removesuffix("_packed")
        assert bits(found[module]).equal(bits(before[name]))
        assert bits(found[f"{module}_scale"]).equal(bits(before[f"{module}_scale"]))
        number = before[f"{module[:-6]}{MATRIX}"]
        assert found[f"{module}_scale_2"].shape == ()
        assert found[f"{module}_scale_2"].equal((1 / number).squeeze())
    wanted = ModelOptNvfp4Converter(targets=["re:.*"]).process(found)
    assert wanted.keys() == after.keys() == before.keys()
    assert all(bits(wanted[name]).equal(bits(after[name])) for name in wanted)
    assert read_json(back / "main/config.json") == read_json(packed / "main/config.json")
    for original in (source, packed):
        verify_weights(other, original)


def test_what_is_no_nvfp4_is_refused(source: Path, tmp_path: Path) -> None:
    """Into other precisions; a number that is no scale."""
    packed = made(source, tmp_path / "packed", SCHEMES[0])
    for pair, said in (
        (("--base-quant", INT8, "--mtp-quant", INT8), "cannot become int8"),
        (("--base-quant", "keep", "--mtp-quant", "bf16"), "that no scheme writes"),
    ):
        outcome = quantize(packed, tmp_path / "refused", *pair)
        assert outcome.code == 4 and said in outcome.err, outcome.err
    name = f"model.layers.0.mlp.down_proj.{MATRIX}"
    planting.write(packed / "main", {name: torch.zeros(1)})
    options = ("--base-quant", SCHEMES[0], "--mtp-quant", "bf16", *MODELOPT)
    outcome = quantize(packed, tmp_path / "refused", *options)
    assert outcome.code == 3 and f"{name} is no scale" in outcome.err
