"""make test-cuda: what it says where there is no GPU, and what its tests need to be installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMAND = ["make", "test-cuda", f"CUDA_PYTHON={sys.executable}"]
# Of the extra dev, what docs/gpu.md asks for.
NEEDED = {"pytest", "safetensors", "triton"}
WITHOUT = "import sys; names = sys.argv.pop(1); sys.modules.update(dict.fromkeys(names.split(',')))"
COLLECT = f"{WITHOUT}; import pytest; sys.exit(pytest.main())"


def test_without_a_gpu_it_says_so_at_once() -> None:
    done = subprocess.run(
        COMMAND, cwd=ROOT, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 2  # make's own
    errors = [line for line in done.stderr.splitlines() if line and not line.startswith("make")]
    assert len(errors) == 1 and re.match(
        "ERROR: --require-cuda: expected a GPU to test on, found none: torch .* no CUDA device",
        errors[0],
    )
    assert "collected" not in done.stdout


@pytest.mark.nightly
def test_its_files_import_nothing_else_of_the_development_environment() -> None:
    printed = subprocess.run(
        [*COMMAND, "--dry-run"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    files = re.findall(r"tests/\S+\.py", printed)
    assert "tests/kernels/verify_attention/test_verify_attention_cuda.py" in files
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.split("[<>=]", one)[0] for one in extras["optional-dependencies"]["dev"]}
    hidden = {"yaml" if n == "pyyaml" else n.replace("-", "_") for n in names - NEEDED} | {"numba"}
    assert {"compressed_tensors", "hypothesis", "pytest_timeout", "transformers"} <= hidden
    arguments = ["--collect-only", "-q", "-m", "cuda", "-p", "no:xdist", *files]
    done = subprocess.run(
        [sys.executable, "-c", COLLECT, ",".join(hidden), *arguments],
        cwd=ROOT, capture_output=True, text=True,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"{file}::" in done.stdout for file in files)
