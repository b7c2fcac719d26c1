"""Processes of the tests compile a function once together."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from compiled_once import compile_once
from forked import Forked
from mtp_kernels.cpu.cache import KernelCache
from mtp_kernels.cpu.jit import compiled


def doubled(values: np.ndarray) -> int:
    return 2 * int(values[0])


def compile_and_tell(log: Path) -> None:
    """Compile it unless it is kept, which takes so long that another process asks for it too."""
    save = KernelCache.save_overload

    def save_slowly(cache: KernelCache, types: Any, result: Any) -> None:
        time.sleep(0.5)
        with log.open("a") as lines:
            lines.write("compiled\n")
        save(cache, types, result)

    KernelCache.save_overload = save_slowly  # type: ignore[method-assign]
    compile_once()
    assert compiled(doubled)(np.full(1, 3)) == 6


def test_the_second_process_waits_for_what_the_first_keeps(tmp_path: Path) -> None:
    log, variables = tmp_path / "log", os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    both = [Forked(compile_and_tell, log, environment=variables) for _ in range(2)]
    assert [process.wait(100) for process in both] == [0, 0]
    assert log.read_text() == "compiled\n"
