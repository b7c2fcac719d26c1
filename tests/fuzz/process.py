"""Environment of a process that fuzzes: the folders that pytest puts on its path."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def fuzz_environment() -> dict[str, str]:
    """Return this process's environment with the project's folders to import from."""
    places = os.pathsep.join(
        str(ROOT / name) for name in (".", "runtime", "checkpoints", "kernels", "tests")
    )
    kept = os.environ.get("PYTHONPATH")
    path = places if kept is None else f"{places}{os.pathsep}{kept}"
    return os.environ | {"PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"}
