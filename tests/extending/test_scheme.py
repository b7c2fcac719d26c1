"""A new scheme on known storages is one file and one line in SCHEMES: nothing else knows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from cases import WHOLE_TILES, make_checkpoint, read_json, run_program
from mtp_checkpoints.families import family_of
from mtp_checkpoints.families.base import Role
from mtp_checkpoints.quantization.stored import stored_model
from mtp_checkpoints.tensors.reader import Checkpoint
from mtp_export.bundle.build import run_bundle
from mtp_export.bundle.launch import launch_lines
from mtp_export.bundle.options import BundleOptions
from mtp_export.bundle.quantize import QuantizeOptions, plan_quantize
from mtp_export.inspection import inspect
from mtp_export.schemes import SCHEMES
from mtp_export.schemes.scheme import Scheme, every_linear
from mtp_export.schemes.table import weigh
from mtp_export.verify.gates import gate_of
from mtp_runtime.models.load import LoadOptions, load_model

TOY = Scheme(
    "toy_fp8_wint8",
    "int8 + fp8",
    every_linear("fp8_block") | {Role.ROUTED_EXPERT: "int8_channel"},
)


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheme in the registry."""
    monkeypatch.setitem(SCHEMES, TOY.name, TOY)


@pytest.mark.parametrize("target", ["vllm", "sglang"])
def test_a_new_scheme_on_known_storages(target: str, tmp_path: Path, output: Path) -> None:
    """Quantized, launched, inspected, loaded and verified by its name alone."""
    source = make_checkpoint(tmp_path / "source", WHOLE_TILES)
    options = QuantizeOptions(
        BundleOptions(source, output, target=target),
        base_quant=TOY.name,
        mtp_quant="a8w8_fp8",
        allow_untested_pair=True,
    )
    plan = plan_quantize(options)
    run_bundle(plan, lambda count: None)
    assert list(launch_lines(plan)) == [target]
    stored = stored_model(read_json(output / "main/config.json"))
    experts = [one for one in stored.main.weights.values() if one.weight.role is Role.ROUTED_EXPERT]
    assert {one.storage for one in experts} == {"int8_channel"}
    assert stored.main.tensors.keys() == Checkpoint.open(output / "main").tensors.keys()
    assert not inspect(output / "main").problems and not inspect(output / "mtp").problems
    ledger = load_model(output, LoadOptions()).ledger
    assert ledger.loaded | ledger.tied == ledger.expected
    verified = run_program("verify", output, "--source", source, "--level", "weights")
    assert verified.code == 0, verified.out + verified.err


def test_a_new_scheme_has_the_gate_of_its_storages() -> None:
    """That of fp8, which is looser than int8's and far from that of unchanged weights."""
    for other in ("a8w8_fp8", TOY.name):
        words, gate = gate_of({"base_quant": TOY.name, "mtp_quant": other})
        assert words == f"{TOY.name} + {other}"
        assert gate == gate_of({"base_quant": "a8w8_fp8", "mtp_quant": "a8w8_fp8"})[1]


def test_a_new_scheme_is_weighed() -> None:
    family = family_of(WHOLE_TILES)
    toy, fp8 = (weigh(family, name, lambda spec: True) for name in (TOY.name, "a8w8_fp8"))
    assert toy.parameters == fp8.parameters
    assert toy.size_bytes > fp8.size_bytes  # a bf16 scale per row, and the shape of each matrix
