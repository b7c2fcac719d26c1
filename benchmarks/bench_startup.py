"""Start-up of the commands, beside what starting Python and torch alone takes, in one run.

    python -m benchmarks.make_checkpoint /data/v3-shapes --family deepseek_v3    # 24 MB of disk
    python -m benchmarks.bench_startup /data/v3-shapes

Rows, in turn, medians of --runs: `inspect` and `--dry-run` on the shapes of DeepSeek-V3, `generate`
on the trained fixture, and the floors `python -c pass` and `python -c "import torch"`. Each ran
once uncounted before, so that bytecode, kernels and files are where a second start finds them. With
--cold the page cache is dropped before each run instead (needs root). Then `generate` and `verify`,
each with an empty folder for compiled kernels and once more: the difference is the compilation.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common.measure import Measured, drop_caches, machine, summary

_PROGRAM = [sys.executable, "-c", "from mtp_export.cli import main; main()"]
_FIXTURE = "fixtures/deepseek-v3-tiny"
_GENERATE = [
    "generate", _FIXTURE, "--prompt", "The first", "--max-new-tokens", "32",
    "--speculate-method", "mtp", "--json",
]  # fmt: skip


def run(command: list[str], environment: Mapping[str, str] | None = None) -> Measured:
    """Run a command to its end; its output is thrown away unless it fails."""
    own = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    start = time.perf_counter()
    process = subprocess.Popen(
        command,
        env=own | dict(environment or {}),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    assert process.stderr is not None
    errors = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{command[:4]} failed:\n{errors.decode()}")
    computed = usage.ru_utime + usage.ru_stime
    return Measured(time.perf_counter() - start, usage.ru_maxrss * 1024, computed)


def rows_of(source: Path, scratch: Path) -> dict[str, list[str]]:
    """The commands by the names of their rows."""
    planning = ["--input-dir", str(source), "--output-dir", str(scratch / "plan"), "--dry-run"]
    return {
        "python -c pass": [sys.executable, "-c", "pass"],
        "import torch": [sys.executable, "-c", "import torch"],
        "inspect": [*_PROGRAM, "inspect", str(source)],
        "--dry-run": [*_PROGRAM, *planning],
        "generate, second start": [*_PROGRAM, *_GENERATE],
    }


def compiling(scratch: Path) -> dict[str, Any]:
    """Seconds of `generate` and `verify` with and without kernels to be found."""
    bundle = str(scratch / "bundle")
    export = ["--input-dir", _FIXTURE, "--output-dir", bundle, "--quiet"]
    run([*_PROGRAM, *export])
    verify = ["verify", bundle, "--max-new-tokens", "32", "--quiet"]
    result: dict[str, Any] = {}
    for name, words in (("generate", _GENERATE), ("verify", verify)):
        with tempfile.TemporaryDirectory(dir=scratch) as empty:
            where = {"XDG_CACHE_HOME": empty, "NUMBA_CACHE_DIR": ""}
            first, second = (run([*_PROGRAM, *words], where).seconds for _ in range(2))
        result[name] = {
            "first_seconds": round(first, 2),
            "second_seconds": round(second, 2),
            "compiling_seconds": round(first - second, 2),
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("source", type=Path, help="a checkpoint of DeepSeek-V3's shapes")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--cold", action="store_true", help="drop the page cache before each run")
    parser.add_argument("--result", type=Path, default=Path("benchmarks/results/startup.json"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        rows = rows_of(arguments.source, Path(scratch))
        measured: dict[str, list[Measured]] = {name: [] for name in rows}
        for command in rows.values():
            run(command)
        for _ in range(arguments.runs):
            for name, command in rows.items():
                if arguments.cold:
                    drop_caches()
                measured[name].append(run(command))
        compiled = {} if arguments.cold else {"compiling": compiling(Path(scratch))}
    medians = {name: median(run.seconds for run in runs) for name, runs in measured.items()}
    result = {
        "machine": machine(),
        "cold": arguments.cold,
        "rows": {name: summary(runs) for name, runs in measured.items()},
        "above_floor_seconds": {
            "inspect": round(medians["inspect"] - medians["python -c pass"], 2),
            "--dry-run": round(medians["--dry-run"] - medians["python -c pass"], 2),
            "generate": round(medians["generate, second start"] - medians["import torch"], 2),
        },
        **compiled,
    }
    arguments.result.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(result, indent=2, ensure_ascii=False)
    arguments.result.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
