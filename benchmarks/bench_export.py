"""Export against cp and against load-then-save, on the real 671B shapes, in one run.

    python -m benchmarks.make_checkpoint /data/v3 --real
    python -m benchmarks.bench_export /data/v3 /data/scratch

Rows, in turn, medians of --runs, the page cache dropped before each and `sync` counted in each:
  (a) this tool, whole bundle, checksums on      (b) cp of the shards that hold the MTP layer
  (c) every MTP tensor into memory, then safetensors' save_file, as the published scripts do
  (d) this tool, --target xllm                   (e) cp of as many bytes as (d) reads and writes / 2
and inspect and --dry-run. Peak memory is the kernel's figure for the process. --rows takes some of
the letters; a result file that is there keeps its other rows.
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
    """One run of a process: seconds until its data is on disk, and its peak memory."""

    seconds: float
    peak_bytes: int


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
    return Measured(time.perf_counter() - start, usage.ru_maxrss * 1024)


def mtp_shards(source: Path, prefix: str) -> list[Path]:
    """The shards that hold a tensor of the MTP layer."""
    index = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
    return sorted({source / file for name, file in index.items() if name.startswith(prefix)})


def bytes_in_and_out(source: Path, scratch: Path, target: str) -> int:
    """Bytes that an export reads plus those it writes (equal for hf), from its own plan."""
    command = [*_PROGRAM, "--input-dir", str(source), "--output-dir", str(scratch / "plan")]
    plan = json.loads(
        subprocess.check_output([*command, "--target", target, "--dry-run", "--json"])
    )
    copied = sum(part["copied_bytes"] for part in plan["parts"].values())
    computed = sum(part["computed_bytes"] for part in plan["parts"].values())
    return copied * 2 + computed + computed // 2  # fp8 in, bf16 out


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


def cases(source: Path, scratch: Path) -> dict[str, Callable[[], Measured]]:
    """The rows by name; each writes into a fresh folder that is removed afterwards."""
    layer = json.loads((source / "config.json").read_text())["num_hidden_layers"]
    prefix = f"model.layers.{layer}."
    shards = mtp_shards(source, prefix)
    half = bytes_in_and_out(source, scratch, "xllm") // 2

    def fresh(command: list[str]) -> Callable[[], Measured]:
        def run() -> Measured:
            shutil.rmtree(scratch / "out", ignore_errors=True)
            (scratch / "out").mkdir(parents=True)
            result = measure(command)
            shutil.rmtree(scratch / "out")
            return result

        return run

    output = str(scratch / "out/bundle")
    export = [*_PROGRAM, "--input-dir", str(source), "--output-dir", output]
    copy = ["sh", "-c", 'mkdir "$0" && cp "$@" "$0"', output, *map(str, shards)]
    load = [sys.executable, "-c", _LOAD_THEN_SAVE, str(source), output, prefix]
    return {
        "(a) mtp-export": fresh([*export, "--quiet"]),
        "(b) cp": fresh(copy),
        "(c) load, save_file": fresh(load),
        "(d) mtp-export --target xllm": fresh([*export, "--target", "xllm", "--quiet"]),
        "(e) cp, the bytes of (d)": fresh(["sh", "-c", cp_of_size(shards, half), output]),
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
    parser.add_argument("--rows", default="abcde")
    parser.add_argument("--result", type=Path, default=Path("benchmarks/results/export.json"))
    arguments = parser.parse_args()
    every = cases(arguments.source, arguments.scratch)
    rows = {name: run for name, run in every.items() if name[1] in arguments.rows}
    measured: dict[str, list[Measured]] = {name: [] for name in rows}
    for number in range(arguments.runs):
        for name, run in rows.items():
            measured[name].append(run())
            print(f"run {number + 1}: {name}: {measured[name][-1]}", flush=True)
    reading = [str(arguments.source)]
    planning = ["--input-dir", *reading, "--output-dir", str(arguments.scratch / "plan")]
    for name, words in (
        ("inspect", ["inspect", *reading]),
        ("--dry-run", [*planning, "--dry-run"]),
    ):
        measured[name] = [measure([*_PROGRAM, *words]) for _ in range(arguments.runs)]
    result = {
        "machine": machine(),
        "rows": {name: summary(runs) for name, runs in measured.items()},
    }
    if arguments.result.exists():
        before = json.loads(arguments.result.read_text())
        result["rows"] = {**before["rows"], **result["rows"]}
    result["ratios"] = ratios(result["rows"])
    arguments.result.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(result, indent=2, ensure_ascii=False)
    arguments.result.write_text(text + "\n")
    print(text)


def summary(runs: list[Measured]) -> dict[str, Any]:
    """A row's median, all its runs, and the load of the machine at its end."""
    return {
        "median_seconds": round(median(run.seconds for run in runs), 2),
        "seconds": [round(run.seconds, 2) for run in runs],
        "peak_bytes": max(run.peak_bytes for run in runs),
        "load_average": round(os.getloadavg()[0], 1),
    }


def ratios(rows: dict[str, Any]) -> dict[str, float]:
    """The figures to reach, of the rows that are there."""
    by_letter = {name[1]: row["median_seconds"] for name, row in rows.items() if name[0] == "("}
    wanted = {
        "a / b (at most 1.25)": "ab",
        "c / a (at least 1.5)": "ca",
        "d / e (at most 1.5)": "de",
    }
    return {
        name: round(by_letter[over] / by_letter[under], 3)
        for name, (over, under) in wanted.items()
        if over in by_letter and under in by_letter
    }


if __name__ == "__main__":
    main()
