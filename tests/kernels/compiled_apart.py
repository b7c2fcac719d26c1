"""Code that is compiled otherwise than for other tests: in a process and a cache of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_apart(code: str, cache: Path) -> None:
    """Run a program, whose kernels are kept in a folder; it has to end with 0."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"NUMBA_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
