"""quantize --measure-inputs: numbers of what goes into linears in nvfp4."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cases import nightly_but, quantize, read_tensors, run_program
from mtp_export import state_files
from mtp_kernels.quantize.block_floats import nvfp4_divisor
from mtp_runtime.layers.moe import gated
from runtime.checkpoints import SMALL, write_checkpoint

CONFIG = SMALL | {
    "torch_dtype": "bfloat16",
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "q_lora_rank": 32,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_group": 2,
}
LAYERS, EXPERTS = CONFIG["num_hidden_layers"], CONFIG["n_routed_experts"]
A4W4 = ("--base-quant", "a4w4_nvfp4", "--mtp-quant", "a4w4_nvfp4", "--allow-untested-pair")
NVFP4 = ("--base-quant", "weight_only_nvfp4", "--mtp-quant", "weight_only_nvfp4")
NUMBER = ".input_global_scale"
PARTS = ("gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of which some columns go into the MTP layer's experts large."""
    folder = write_checkpoint(tmp_path_factory.mktemp("source") / "model", CONFIG)
    tensors = load_file(folder / "model.safetensors")
    tensors[f"model.layers.{LAYERS}.post_attention_layernorm.weight"][::9] *= 30
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def numbers_of(part: Path) -> dict[str, float]:
    """Numbers of inputs by module."""
    tensors = read_tensors(part)
    found = {name: one for name, one in tensors.items() if name.endswith(NUMBER)}
    return {name.removesuffix(NUMBER): float(one) for name, one in found.items()}


def of_experts(numbers: dict[str, float], layer: int) -> dict[str, set[float]]:
    """Numbers that the experts of a layer have, by projection."""
    prefix = f"model.layers.{layer}.mlp.experts"
    return {part: {numbers[f"{prefix}.{n}.{part}"] for n in range(EXPERTS)} for part in PARTS}


@pytest.mark.parametrize("method", nightly_but(["gptq"], ["gptq", "awq"]))
def test_they_are_those_of_the_largest_input(
    method: str, source: Path, data: Path, tmp_path: Path
) -> None:
    """Of the MTP layer by its rows in the work folder, under the scales that are folded in; one for
    all experts of a layer, over which shards of 10 kB go."""
    bundle = tmp_path / "bundle"
    options = (*A4W4, "--calibrate", data, "--calibrate-main", "--max-shard-size", "10kB")
    outcome = quantize(source, bundle, *options, "--measure-inputs", "--method", method)
    assert outcome.code == 0, outcome.err
    (work,) = (tmp_path / "bundle-work").iterdir()
    (path,) = (work / "inputs").iterdir()
    x = state_files.load(path)[f"model.layers.{LAYERS}.mlp"].float()
    columns = torch.zeros(x.shape[1])
    if method == "awq":
        columns = state_files.load(work / f"scales/model.layers.{LAYERS}.mlp.pt")["exponents"]
        assert columns.any()
    wanted = nvfp4_divisor(float((x / columns.float().exp2()).abs().max()))
    numbers = numbers_of(bundle / "mtp")
    experts = of_experts(numbers, LAYERS)
    assert experts["gate_proj"] == experts["up_proj"] == {wanted}
    (down,) = experts["down_proj"]
    if method == "gptq":
        assert down == pytest.approx(nvfp4_divisor(largest_inner(source, x)), rel=1e-4)
    main = numbers_of(bundle / "main")
    assert not {0.0, 1.0} & {*main.values(), *numbers.values()}
    for layer in range(CONFIG["first_k_dense_replace"], LAYERS):
        assert [len(found) for found in of_experts(main, layer).values()] == [1, 1, 1]
    verified = run_program("verify", bundle, "--source", source, "--level", "ledger")
    assert "unlike" not in verified.out


def largest_inner(source: Path, x: torch.Tensor) -> float:
    """The largest magnitude of what goes into the down projections of all experts, shared too."""
    weights, most = read_tensors(source), 0.0
    for own in (*(f"experts.{number}" for number in range(EXPERTS)), "shared_experts"):
        prefix = f"model.layers.{LAYERS}.mlp.{own}"
        both = torch.cat([weights[f"{prefix}.{part}.weight"].float() for part in PARTS[:2]])
        most = max(most, float(gated(x @ both.t(), None).abs().max()))
    return most


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (NVFP4, "No weight whose codes are chosen has a scale for its inputs"),
        ((*A4W4, "--share", "1/2"), "--measure-inputs takes the inputs of all weights"),
    ],
    ids=["weights alone", "share"],
)
def test_refusals(
    options: tuple[str, ...], said: str, source: Path, data: Path, tmp_path: Path
) -> None:
    given = (*options, "--measure-inputs", "--calibrate", data)
    outcome = quantize(source, tmp_path / "bundle", *given)
    assert outcome.code == 2 and said in " ".join(outcome.err.split()), outcome.err
    assert list(tmp_path.iterdir()) == []


def test_alone_it_is_refused(source: Path, tmp_path: Path) -> None:
    refused = quantize(source, tmp_path / "bundle", *A4W4, "--measure-inputs")
    assert refused.code == 2 and "--measure-inputs beside --calibrate" in refused.err
