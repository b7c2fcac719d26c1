"""Packages of kernels load a backend when it is used, and not before. One process for all of them:
importing torch takes seconds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = sorted(
    f"mtp_kernels.{path.parent.name}"
    for path in (ROOT / "kernels/mtp_kernels").glob("*/__init__.py")
    if "\nBACKENDS" in path.read_text()
)
PROGRAM = """
import sys
from importlib import import_module

for package in sys.argv[1:]:
    import_module(package)
    loaded = {"mtp_export", "numba", "torch_npu", "triton"} & set(sys.modules)
    assert not loaded, (package, loaded)

import torch
from mtp_kernels.weight_statistics import float_statistics

float_statistics(torch.ones(100))
assert "numba" not in sys.modules, "a small weight is measured before code could be compiled"
float_statistics(torch.ones(1 << 20))
assert "numba" in sys.modules, "a large one is measured by compiled code"
"""


def test_backends_are_loaded_when_they_are_used() -> None:
    assert len(PACKAGES) == 6
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *PACKAGES],
        cwd=ROOT / "kernels",
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
