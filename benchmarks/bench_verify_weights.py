"""`verify --level files` and `--level weights` against the disk's limit, in one run.

    python -m benchmarks.bench_verify_weights /data/scratch

It writes a checkpoint of V3's widths (one dense layer, an MTP layer of --experts experts, embedding
and head: all random, none of it a hole) and a bundle of it: of 160 experts 12 GB, of which 2 GB lie
there twice. Rows, in turn, medians of --runs, the page cache dropped before each:
  limit      the bundle's shards read by common/direct_loop.py, as deep as is best in this run
  files      verify --level files, with checksums of all tensors
  weights    verify --level weights: the same bytes, for checksums and the facts of every weight
  source     verify --level weights --source: both sides; a linked shard is read once
Of these the seconds of the checks count, by the report; start-up is shown beside them. A share is
that of the limit, or of 1.5 GB/s where the limit is higher. The kernels are measured first, in
memory, by one thread (bench_weight_statistics). --keep leaves checkpoint and bundle.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common.limits import DiskWork, best_depth
from benchmarks.common.measure import machine, measure
from benchmarks.make_checkpoint import REAL_CONFIG, make_checkpoint

_PROGRAM = [sys.executable, "-c", "from mtp_export.cli import main; main()"]
_KERNELS = [sys.executable, "-m", "benchmarks.bench_weight_statistics"]
_SHARD_BYTES = 2_000_000_000
_MOST_WANTED = 1.5e9  # bytes per second of two cores
_LEVELS = {"files": ["files"], "weights": ["weights"], "source": ["weights", "--source"]}


def prepare(folder: Path, experts: int) -> tuple[Path, Path]:
    """Return a checkpoint and its bundle, written if they are not there."""
    source, bundle = folder / "verify_source", folder / "verify_bundle"
    if not bundle.exists():
        shutil.rmtree(source, ignore_errors=True)
        print("writing", source, flush=True)
        config = REAL_CONFIG | {
            "num_hidden_layers": 1,
            "first_k_dense_replace": 1,
            "n_routed_experts": experts,
        }
        make_checkpoint(
            source, config, own_copies=False, max_shard_bytes=_SHARD_BYTES, parted=False
        )
        export = ["--input-dir", str(source), "--output-dir", str(bundle), "--checksums", "all"]
        export += ["--link", "hardlink", "--shared-weights", "drop", "--quiet"]
        measure([*_PROGRAM, *export])
    return source, bundle


def verify(bundle: Path, level: list[str], report: Path) -> dict[str, float]:
    """Seconds of a cold run: of the checks, and of all else, which is start-up."""
    # --stream: the whole model is not loaded, whatever memory this machine has.
    words = ["verify", str(bundle), "--stream", "--quiet", "--report", str(report)]
    run = measure([*_PROGRAM, *words, "--level", *level])
    checks = json.loads(report.read_text())["seconds"]
    return {
        "seconds": checks,
        "start_up_seconds": run.seconds - checks,
        "peak_bytes": float(run.peak_bytes),
    }


def row(name: str, runs: list[dict[str, float]], bytes_read: int, limit: float) -> dict[str, Any]:
    """A row's medians, its rate, and the share that this is of the limit."""
    seconds = median(run["seconds"] for run in runs)
    rate = bytes_read / seconds
    return {
        "name": name,
        "bytes": bytes_read,
        "seconds": round(seconds, 2),
        "all_seconds": [round(run["seconds"], 2) for run in runs],
        "start_up_seconds": round(median(run["start_up_seconds"] for run in runs), 2),
        "peak_bytes": int(max(run["peak_bytes"] for run in runs)),
        "gb_per_second": round(rate / 1e9, 3),
        "share": round(rate / min(limit, _MOST_WANTED), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--experts", type=int, default=160)
    parser.add_argument("--keep", action="store_true")
    parser.add_argument(
        "--result", type=Path, default=Path("benchmarks/results/verify_weights.json")
    )
    arguments = parser.parse_args()
    rates = json.loads(subprocess.check_output(_KERNELS))
    print("kernels in GB/s:", rates, flush=True)
    source, bundle = prepare(arguments.scratch, arguments.experts)
    shards = sorted(bundle.glob("*/*.safetensors"))
    own = sum(path.stat().st_size for path in shards)
    copied = sum(path.stat().st_size for path in shards if path.stat().st_nlink == 1)
    reading = DiskWork(tuple((str(path), 0, path.stat().st_size) for path in shards), 0)
    scratch = arguments.scratch
    (scratch / "out").mkdir(exist_ok=True)
    depth = best_depth(reading, scratch, lambda command: measure(command).seconds)
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in _LEVELS}
    limits: list[float] = []
    for number in range(arguments.runs):
        limits.append(own / measure(reading.command(scratch, depth)).seconds)
        print(f"run {number + 1}: limit {limits[-1] / 1e9:.2f} GB/s at depth {depth}", flush=True)
        for name, level in _LEVELS.items():
            words = [*level, str(source)] if "--source" in level else level
            runs[name].append(verify(bundle, words, scratch / "verify_report.json"))
            print(f"run {number + 1}: {name}", runs[name][-1], flush=True)
    limit = median(limits)
    sizes = {"files": own, "weights": own, "source": own + copied}
    result = {
        "machine": machine(),
        "kernels_gb_per_second": rates,
        "limit": {"depth": depth, "gb_per_second": [round(one / 1e9, 3) for one in limits]},
        "rows": [row(name, found, sizes[name], limit) for name, found in runs.items()],
        "load_average": round(os.getloadavg()[0], 1),
    }
    text = json.dumps(result, indent=2, ensure_ascii=False)
    arguments.result.write_text(text + "\n")
    print(text)
    if not arguments.keep:
        shutil.rmtree(source)
        shutil.rmtree(bundle)


if __name__ == "__main__":
    main()
