"""Every tuned launch compiles for its device, without a device; a spill fails here, not in use."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from cases import nightly_but
from forked import completed, script

ROOT = Path(__file__).resolve().parents[3]
# What one program may use: CUDA programming guide, compute capabilities.
SHARED_BYTES = {"8.0": 166_912, "9.0": 232_448, "10.0": 232_448}


def compiling() -> dict[str, str]:
    """Variables of a process of its own: in this one Triton may be interpreting."""
    return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


def compile_report(tmp_path: Path, *options: str) -> list[dict[str, Any]]:
    path = tmp_path / "report.json"
    report = ROOT / "benchmarks/compile_report_verify_attention.py"
    done = completed(script, report, "--json", path, *options, environment=compiling())
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    return rows


@pytest.mark.parametrize("capability", nightly_but(["9.0"], SHARED_BYTES))
def test_every_tuned_launch(tmp_path: Path, capability: str) -> None:
    rows = compile_report(tmp_path, "--capability", capability)
    assert {row["kind"] for row in rows} >= {"16 bit", "fp32"}
    for row in rows:
        assert row["spilled_bytes"] == 0, row
        assert row["shared_bytes"] * row["programs_per_sm"] <= SHARED_BYTES[capability], row
        tensor_cores = row["wgmma"] + row["mma"] + row["tcgen05"]
        assert (tensor_cores > 0) == (row["kind"] != "fp32"), row


def test_tiles_of_64_rows_use_wgmma_on_hopper(tmp_path: Path) -> None:
    """Every Triton uses it; 3.9 spills, so that its table lacks the tile that is compiled here."""
    (row,) = compile_report(tmp_path, "--rows-64")
    assert row["wgmma"] > 0 and row["mma"] == 0
    assert row["spilled_bytes"] <= 192
    assert row["shared_bytes"] <= SHARED_BYTES["9.0"]


def test_launches_find_what_was_compiled_beforehand(tmp_path: Path) -> None:
    """Else a GPU's tuning compiles every candidate twice, the second time one after another."""
    compiled = ROOT / "tests/kernels/compiled_beforehand.py"
    done = completed(script, compiled, tmp_path, environment=compiling())
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"16 bit": [1, 1], "fp8": [2, 2], "fp32": [3, 3]}
