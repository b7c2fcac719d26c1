"""Export against cp, load-then-save and the machine's limit, on the real 671B shapes, in one run.

    python -m benchmarks.make_checkpoint /data/v3 --real
    python -m benchmarks.bench_export /data/v3 /data/scratch

Rows, in turn, medians of --runs, the page cache dropped before each and `sync` counted in each:
  (a) this tool, whole bundle, checksums on      (b) cp of the shards that hold the MTP layer
  (c) every MTP tensor into memory, then safetensors' save_file, as the published scripts do
  (d) this tool, --target xllm                   (e) cp of as many bytes as (d) reads and writes / 2
  (f) the bytes of (a), by direct I/O alone      (g) the bytes of (d), by direct I/O alone
and inspect and --dry-run. The direct I/O is as deep as is best in this run (benchmarks/limits.py),
which also measures the kernels of (d) alone; the shares of (a) and (d) are those of the slower of
the two limits. Peak memory is the kernel's figure for the process. --rows takes some of the
letters; a result file that is there keeps its other rows.
"""

from __future__ import annotations

import argparse
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

from benchmarks.limits import DiskWork, best_depth, kernel_rates, planned

_PROGRAM = [sys.executable, "-c", "from mtp_export.cli import main; main()"]
_LOAD_THEN_SAVE = """
import sys
from pathlib import Path
from safetensors import safe_open
from safetensors.torch import save_file
source, output, prefix = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
tensors = {}
for path in sorted(source.glob("*.safetensors")):
    with safe_open(path, framework="pt") as shard:
        for name in shard.keys():
            if name.startswith(prefix):
                tensors[name] = shard.get_tensor(name)
output.mkdir(parents=True)
save_file(tensors, output / "mtp.safetensors")
"""


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
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    errors = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{command[:4]} failed:\n{errors.decode()}")
    os.sync()
    computed = usage.ru_utime + usage.ru_stime
    return Measured(time.perf_counter() - start, usage.ru_maxrss * 1024, computed)


def mtp_shards(source: Path, prefix: str) -> list[Path]:
    """The shards that hold a tensor of the MTP layer."""
    index = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
    return sorted({source / file for name, file in index.items() if name.startswith(prefix)})


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


@dataclass(frozen=True)
class DiskLimit:
    """Bytes of a run, and the depth at which direct I/O alone moves them fastest."""

    work: DiskWork
    depth: int
    scratch: Path

    @classmethod
    def of(cls, work: DiskWork, scratch: Path) -> DiskLimit:
        """Find the depth, in this run."""
        depth = best_depth(work, scratch, lambda command: fresh(command, scratch)().seconds)
        return cls(work, depth, scratch)

    def run(self) -> Measured:
        """Move the bytes."""
        return fresh(self.work.command(self.scratch, self.depth), self.scratch)()

    def facts(self) -> dict[str, int]:
        """Return what the result file says of it."""
        return {"bytes": self.work.size_bytes, "depth": self.depth}


def cases(source: Path, scratch: Path) -> dict[str, Callable[[], Measured]]:
    """The rows of whole programs by name."""
    layer = json.loads((source / "config.json").read_text())["num_hidden_layers"]
    prefix = f"model.layers.{layer}."
    shards = mtp_shards(source, prefix)
    half = planned("xllm", source)[0].size_bytes // 2
    output = str(scratch / "out/bundle")
    export = [*_PROGRAM, "--input-dir", str(source), "--output-dir", output]
    copy = ["sh", "-c", 'mkdir "$0" && cp "$@" "$0"', output, *map(str, shards)]
    load = [sys.executable, "-c", _LOAD_THEN_SAVE, str(source), output, prefix]
    return {
        "(a) mtp-export": fresh([*export, "--quiet"], scratch),
        "(b) cp": fresh(copy, scratch),
        "(c) load, save_file": fresh(load, scratch),
        "(d) mtp-export --target xllm": fresh([*export, "--target", "xllm", "--quiet"], scratch),
        "(e) cp, the bytes of (d)": fresh(["sh", "-c", cp_of_size(shards, half), output], scratch),
    }


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--rows", default="abcdefg")
    parser.add_argument("--result", type=Path, default=Path("benchmarks/results/export.json"))
    arguments = parser.parse_args()
    source, scratch, letters = arguments.source, arguments.scratch, arguments.rows
    rows = {name: run for name, run in cases(source, scratch).items() if name[1] in letters}
    limits = disk_limits(source, scratch, letters)
    rows |= {name: limit.run for name, limit in limits.items()}
    rates = kernel_rates(["xllm"] if "g" in letters else [])
    measured: dict[str, list[Measured]] = {name: [] for name in rows}
    for number in range(arguments.runs):
        for name, run in rows.items():
            measured[name].append(run())
            print(f"run {number + 1}: {name}: {measured[name][-1]}", flush=True)
    planning = ["--input-dir", str(source), "--output-dir", str(scratch / "plan")]
    for name, words in (
        ("inspect", ["inspect", str(source)]),
        ("--dry-run", [*planning, "--dry-run"]),
    ):
        measured[name] = [measure([*_PROGRAM, *words]) for _ in range(arguments.runs)]
    result: dict[str, Any] = {
        "machine": machine(),
        "rows": {name: summary(runs) for name, runs in measured.items()},
        "limits": {name: limit.facts() for name, limit in limits.items()},
    }
    if rates:
        result["limits"]["kernels of (d)"] = {
            "elements_per_second": round(rates["xllm"]),
            "elements": planned("xllm", source)[1],
        }
    save(arguments.result, result)


def disk_limits(source: Path, scratch: Path, letters: str) -> dict[str, DiskLimit]:
    """The rows of direct I/O alone by name."""
    wanted = {"(f) the bytes of (a), direct I/O": "hf", "(g) the bytes of (d), direct I/O": "xllm"}
    return {
        name: DiskLimit.of(planned(target, source)[0], scratch)
        for name, target in wanted.items()
        if name[1] in letters
    }


def save(path: Path, result: dict[str, Any]) -> None:
    """Write a result and its table, with the other rows of an earlier one."""
    if path.exists():
        before = json.loads(path.read_text())
        for key in ("rows", "limits"):
            result[key] = {**before.get(key, {}), **result[key]}
    result["ratios"] = ratios(result["rows"])
    result["shares"] = shares(result["rows"], result["limits"])
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(result, indent=2, ensure_ascii=False)
    path.write_text(text + "\n")
    print(text)
    for name, row in result["rows"].items():
        share = result["shares"].get(name[:3])
        print(
            f"{name:34} {row['median_seconds']:7.2f} s",
            f"{share:.2f} of the limit" if share else "",
        )


def summary(runs: list[Measured]) -> dict[str, Any]:
    """A row's median, all its runs, and the load of the machine at its end."""
    return {
        "median_seconds": round(median(run.seconds for run in runs), 2),
        "seconds": [round(run.seconds, 2) for run in runs],
        "peak_bytes": max(run.peak_bytes for run in runs),
        "load_average": round(os.getloadavg()[0], 1),
    }


def seconds_by_letter(rows: dict[str, Any]) -> dict[str, float]:
    """Medians of the rows that have a letter."""
    return {name[1]: row["median_seconds"] for name, row in rows.items() if name[0] == "("}


def ratios(rows: dict[str, Any]) -> dict[str, float]:
    """The figures to reach, of the rows that are there."""
    seconds = seconds_by_letter(rows)
    wanted = {
        "a / b (at most 1.25)": "ab",
        "c / a (at least 1.5)": "ca",
        "d / e (at most 1.5)": "de",
    }
    return {
        name: round(seconds[over] / seconds[under], 3)
        for name, (over, under) in wanted.items()
        if over in seconds and under in seconds
    }


def shares(rows: dict[str, Any], limits: dict[str, Any]) -> dict[str, float]:
    """Shares of the limit: 1 is as fast as the slower of the disk and the kernels alone."""
    seconds = seconds_by_letter(rows)
    kernels = limits.get("kernels of (d)")
    least = kernels["elements"] / kernels["elements_per_second"] if kernels else 0.0
    found = {}
    if "a" in seconds and "f" in seconds:
        found["(a)"] = round(seconds["f"] / seconds["a"], 3)
    if "d" in seconds and "g" in seconds:
        found["(d)"] = round(max(seconds["g"], least) / seconds["d"], 3)
    return found


if __name__ == "__main__":
    main()
