"""Export against cp, load-then-save and the machine's limit, on the real 671B shapes, in one run.

    python -m benchmarks.make_checkpoint /data/v3 --real
    python -m benchmarks.bench_export /data/v3 /data/scratch

or with `--real --family qwen3_next` for 80B ones, which have rows abcf (xLLM has no such family).

Rows, in turn, medians of --runs, the page cache dropped before each and `sync` counted in each:
  (a) this tool, whole bundle, checksums on      (b) cp of the shards that hold the MTP layer
  (c) every MTP tensor into memory, then safetensors' save_file, as the published scripts do
  (d) this tool, --target xllm                   (e) cp of as many bytes as (d) reads and writes / 2
  (f) the bytes of (a), by direct I/O alone      (g) the bytes of (d), by direct I/O alone
and inspect and --dry-run. The direct I/O is as deep as is best in this run (limits.py), which
also measures the kernels of (d) alone; the shares of (a) and (d) are those of the slower of
the two limits. Peak memory is the kernel's figure for the process. --rows takes some of the
letters; a result file that is there keeps its other rows.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common.limits import DiskLimit, kernel_rates, planned
from benchmarks.common.measure import (
    PROGRAM,
    Measured,
    cp_of_size,
    fresh,
    machine,
    measure,
    mtp_shards,
    summary,
)

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


def cases(source: Path, scratch: Path, letters: str) -> dict[str, Callable[[], Measured]]:
    """The rows of whole programs by name, those of some letters."""
    prefix, shards = mtp_shards(source)
    half = planned("xllm", source)[0].size_bytes // 2 if "e" in letters else 0
    output = str(scratch / "out/bundle")
    export = [*PROGRAM, "--input-dir", str(source), "--output-dir", output]
    copy = ["sh", "-c", 'mkdir "$0" && cp "$@" "$0"', output, *map(str, shards)]
    load = [sys.executable, "-c", _LOAD_THEN_SAVE, str(source), output, prefix]
    rows = {
        "(a) mtp-export": fresh([*export, "--quiet"], scratch),
        "(b) cp": fresh(copy, scratch),
        "(c) load, save_file": fresh(load, scratch),
        "(d) mtp-export --target xllm": fresh([*export, "--target", "xllm", "--quiet"], scratch),
        "(e) cp, the bytes of (d)": fresh(["sh", "-c", cp_of_size(shards, half), output], scratch),
    }
    return {name: run for name, run in rows.items() if name[1] in letters}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--rows", default="abcdefg")
    parser.add_argument("--result", type=Path, default=Path("benchmarks/results/export.json"))
    arguments = parser.parse_args()
    source, scratch, letters = arguments.source, arguments.scratch, arguments.rows
    rows = cases(source, scratch, letters)
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
        measured[name] = [measure([*PROGRAM, *words]) for _ in range(arguments.runs)]
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
