"""Mutated inputs through every command that reads a checkpoint, a bundle, a journal or prompts.

A failure names the seed of its input, and the command that runs that one again.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from cases import nightly_but
from fuzz.process import ROOT, fuzz_environment

_SET_UP_SECONDS = 540  # with kernels that are not compiled yet, on a busy machine
_SEEDS_OF_A_LANE = 1_000_000_000


@pytest.mark.timeout(0)  # its own is below
@pytest.mark.parametrize("lane", nightly_but([0], (0, 1)))  # at the same time, on two cores
def test_mutated_inputs(lane: int, pytestconfig: pytest.Config) -> None:
    """No input makes an internal error, a hang, a wrong byte or a file that should not be there."""
    seed = pytestconfig.getoption("--fuzz-seed") + lane * _SEEDS_OF_A_LANE
    seconds = pytestconfig.getoption("--fuzz-seconds")
    outcome = subprocess.run(
        [sys.executable, "-m", "fuzz", "--seed", str(seed), "--seconds", str(seconds)],
        env=fuzz_environment(),
        cwd=ROOT,
        timeout=seconds + _SET_UP_SECONDS,
        capture_output=True,
        text=True,
        check=False,
    )
    print(outcome.stdout)
    if outcome.returncode:
        pytest.fail(f"{outcome.stdout}\n{outcome.stderr}", pytrace=False)
