"""Calibrations in shares: equal, byte by byte, to those of one run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from calibrate.test_calibration import files_of
from cases import make_checkpoint, quantize, run_program

PAIR = (
    *("--base-quant", "weight_only_nvfp4", "--mtp-quant", "weight_only_nvfp4"),
    *("--max-shard-size", "40kB"),
)


@pytest.mark.nightly
@pytest.mark.parametrize(("count", "method"), [(2, "gptq"), (3, "gptq"), (3, "awq")])
def test_shares_at_once(count: int, method: str, data: Path, tmp_path: Path) -> None:
    """Processes that wait for one another's main shards, and need no second run."""
    source = make_checkpoint(tmp_path / "source", max_shard_bytes=40_000)
    options = (*PAIR, "--calibrate", data, "--method", method)
    assert quantize(source, tmp_path / "whole", *options).code == 0
    output, program = tmp_path / "bundle", "from mtp_export.cli import main; main()"
    words = ["quantize", "--input-dir", source, "--output-dir", output, *options, "--quiet"]
    shares = [["--share", f"{number}/{count}"] for number in range(1, count + 1)]
    environment = {"PYTHONPATH": ":".join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    children = [
        subprocess.Popen([sys.executable, "-c", program, *map(str, words), *share], env=environment)
        for share in shares
    ]
    assert [child.wait() for child in children] == [0] * count
    finished = run_program("finish", output)
    assert finished.code == 0, finished.err
    assert "Calibrated: " in finished.out
    assert files_of(output) == files_of(tmp_path / "whole")
