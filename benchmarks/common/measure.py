"""Runs of whole programs: seconds until their data is on disk, memory, and the machine's facts."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from shlex import quote
from statistics import median
from typing import Any

from mtp_checkpoints.containers.base import CONFIG_NAME
from mtp_checkpoints.containers.safetensors import INDEX_NAME
from mtp_checkpoints.families import family_of

PROGRAM = [sys.executable, "-c", "from mtp_export.cli import main; main()"]


@dataclass(frozen=True)
class Measured:
    """One run of a process: seconds until its data is on disk, its peak memory, and the seconds
    that it computed, in its own code and in the kernel."""

    seconds: float
    peak_bytes: int
    cpu_seconds: float


def drop_caches() -> None:
    """Write everything back and forget it; needs root."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


def measure(command: list[str], cold: bool = True) -> Measured:
    """Run a command and then sync; its output is thrown away unless it fails."""
    if cold:
        drop_caches()
    start = time.perf_counter()
    # Modules are compiled by the first run alone, as where people install them.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment
    )
    assert process.stderr is not None
    errors = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{command[:4]} failed:\n{errors.decode()}")
    os.sync()
    computed = usage.ru_utime + usage.ru_stime
    return Measured(time.perf_counter() - start, usage.ru_maxrss * 1024, computed)


def mtp_shards(source: Path) -> tuple[str, list[Path]]:
    """What the names of the MTP layer's tensors begin with, and the shards that hold one."""
    family = family_of(json.loads((source / CONFIG_NAME).read_text()))
    index = json.loads((source / INDEX_NAME).read_text())["weight_map"]
    names = [name for name in index if family.mtp_layer_of(name) is not None]
    return os.path.commonprefix(names), sorted({source / index[name] for name in names})


def cp_of_size(shards: list[Path], size_bytes: int) -> str:
    """A shell command that copies this many bytes of these files, the last part by dd."""
    parts = ["set -e", "mkdir -p $0"]
    left = size_bytes
    for number, shard in enumerate(shards * 4):
        if left <= 0:
            break
        size = shard.stat().st_size
        if size <= left:
            parts.append(f"cp {quote(str(shard))} $0/{number}")
        else:
            parts.append(
                f"dd if={quote(str(shard))} of=$0/{number} bs=1M count={left >> 20} status=none"
            )
        left -= size
    return "; ".join(parts)


def fresh(command: list[str], scratch: Path, cold: bool = True) -> Callable[[], Measured]:
    """A run of a command that writes scratch/out/bundle, removed afterwards."""

    def run() -> Measured:
        shutil.rmtree(scratch / "out", ignore_errors=True)
        (scratch / "out").mkdir(parents=True)
        result = measure(command, cold)
        shutil.rmtree(scratch / "out")
        return result

    return run


def machine() -> dict[str, str]:
    """Return the machine facts that the figures depend on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], text=True).strip()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": f"{model}, {os.cpu_count()} cores",
        "memory": f"{memory / 2**30:.0f} GiB",
        "python": platform.python_version(),
        "safetensors": version("safetensors"),
        "torch": version("torch"),
        "commit": commit,
    }


def summary(runs: list[Measured]) -> dict[str, Any]:
    """A row's median, all its runs, and the load of the machine at its end."""
    return {
        "median_seconds": round(median(run.seconds for run in runs), 2),
        "seconds": [round(run.seconds, 2) for run in runs],
        "peak_bytes": max(run.peak_bytes for run in runs),
        "load_average": round(os.getloadavg()[0], 1),
    }
