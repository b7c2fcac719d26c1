"""Readers of headers, JSON and prompts on inputs that atheris grows by the branches they reach."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fuzz.process import ROOT, fuzz_environment

_MAX_SECONDS = 300.0
_TARGETS = ("header", "json", "prompts")


@pytest.mark.nightly
@pytest.mark.timeout(0)  # libFuzzer has a limit of its own
@pytest.mark.parametrize("target", _TARGETS)
def test_guided_inputs(target: str, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """A reader takes what the format's own reader takes, or raises an error of this program."""
    pytest.importorskip("atheris", reason="make fuzz installs atheris")
    seconds = min(_MAX_SECONDS, pytestconfig.getoption("--fuzz-seconds"))
    seed = pytestconfig.getoption("--fuzz-seed") % 2**31 + 1  # 0 would be drawn from the clock
    limits = (f"-seed={seed}", f"-max_total_time={max(1, int(seconds))}")
    outcome = subprocess.run(
        [sys.executable, "-m", "fuzz.guided", target, *limits],
        env=fuzz_environment() | {"TMPDIR": str(tmp_path)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    print(outcome.stderr[-500:])
    if outcome.returncode:
        pytest.fail(outcome.stderr[-8000:], pytrace=False)
