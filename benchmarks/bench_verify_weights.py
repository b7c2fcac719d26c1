"""`verify --level files` and `--level weights` against the disk's limit, in one run.

    python -m benchmarks.bench_verify_weights /data/scratch

It writes a checkpoint of V3's widths (one dense layer, an MTP layer of --experts experts, embedding
and head: all random, none of it a hole) and a bundle of it, if they are not there: of 128 experts
11 GB and 7 GB more. Rows, in turn, medians of --runs, the page cache dropped before each:
  limit      every shard of the bundle read by a plain loop of direct reads of 4 MB, at each of
             several depths; the best counts
  files      verify --level files, with checksums of all tensors
  weights    verify --level weights: the same bytes, for checksums and the facts of every weight
  source     verify --level weights --source: both sides; a linked shard is read once
Of these the seconds of the checks count, by the report; start-up is shown beside them. A share is
that of the limit, or of 1.5 GB/s where the limit is higher. The kernels are measured first, in
memory, by one thread. --keep leaves checkpoint and bundle.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from threading import Lock
from typing import Any

import torch

from benchmarks.bench_export import drop_caches, machine, measure
from benchmarks.make_checkpoint import REAL_CONFIG, make_checkpoint
from mtp_kernels import weight_statistics
from mtp_kernels.quantize import Fp8Block, Int4Group, Int8Channel, W4AFp8

_PROGRAM = [sys.executable, "-c", "from mtp_export.cli import main; main()"]
_SHARD_BYTES = 4_300_000_000
_READ_BYTES = 4 << 20
_DEPTHS = (1, 2, 4, 8, 16)
_MOST_WANTED = 1.5e9  # bytes per second of two cores
_LEVELS = {"files": ["files"], "weights": ["weights"], "source": ["weights", "--source"]}


def prepare(folder: Path, experts: int) -> tuple[Path, Path]:
    """Return a checkpoint and its bundle, written if they are not there."""
    source, bundle = folder / "verify_source", folder / "verify_bundle"
    if not bundle.exists():
        shutil.rmtree(source, ignore_errors=True)
        config = REAL_CONFIG | {
            "num_hidden_layers": 1,
            "first_k_dense_replace": 1,
            "n_routed_experts": experts,
        }
        make_checkpoint(
            source, config, own_copies=False, max_shard_bytes=_SHARD_BYTES, parted=False
        )
        export = ["--input-dir", str(source), "--output-dir", str(bundle), "--checksums", "all"]
        measure([*_PROGRAM, *export, "--link", "hardlink", "--quiet"])
    return source, bundle


def read_directly(shards: list[Path], depth: int) -> float:
    """Return the bytes per second at which as many threads read whole files past the cache."""
    drop_caches()
    opened = {path: os.open(path, os.O_RDONLY | os.O_DIRECT) for path in shards}
    places = iter(
        [
            (opened[path], start)
            for path in shards
            for start in range(0, path.stat().st_size, _READ_BYTES)
        ]
    )
    lock = Lock()

    def read() -> int:
        buffer, done = mmap.mmap(-1, _READ_BYTES), 0
        while True:
            with lock:
                place = next(places, None)
            if place is None:
                return done
            done += os.preadv(place[0], [buffer], place[1])

    start = time.perf_counter()
    with ThreadPoolExecutor(depth) as pool:
        done = sum(future.result() for future in [pool.submit(read) for _ in range(depth)])
    seconds = time.perf_counter() - start
    for descriptor in opened.values():
        os.close(descriptor)
    return done / seconds


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


def kernels() -> dict[str, float]:
    """Bytes per second of each format's kernel on codes in memory, by one thread."""
    rows, columns = 2048, 7168
    codes = torch.randint(0, 256, (rows, columns), dtype=torch.uint8) & 0xF7
    fp8, words = codes.view(torch.float8_e4m3fn), codes.view(torch.int32)
    values = torch.randn(rows, columns)
    one, groups = torch.ones(rows, 1), torch.ones(rows, 2 * columns // 128)
    statistics = weight_statistics
    int8, int4 = Int8Channel(words, one.bfloat16()), Int4Group(words, groups.bfloat16())
    block, w4afp8 = Fp8Block(fp8, torch.ones(16, 56)), W4AFp8(codes.view(torch.int8), groups)
    small, half = values.bfloat16(), values.half()
    cases: dict[str, tuple[Callable[[], object], int]] = {
        "bf16": (lambda: statistics.float_statistics(small), small.nbytes),
        "f16": (lambda: statistics.float_statistics(half), half.nbytes),
        "f32": (lambda: statistics.float_statistics(values), values.nbytes),
        "fp8 block": (lambda: statistics.fp8_block_statistics(block), codes.nbytes),
        "fp8 channel": (lambda: statistics.fp8_channel_statistics(fp8, one), codes.nbytes),
        "int8 channel": (lambda: statistics.int8_channel_statistics(int8), codes.nbytes),
        "int4 group": (lambda: statistics.int4_group_statistics(int4), codes.nbytes),
        "w4afp8": (lambda: statistics.w4afp8_statistics(w4afp8), codes.nbytes),
    }
    return {name: round(size / _best(run) / 1e9, 2) for name, (run, size) in cases.items()}


def _best(run: Callable[[], object]) -> float:
    """Return the seconds of the fastest of several calls, compiled before."""
    run()
    times = []
    for _ in range(7):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


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
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--keep", action="store_true")
    parser.add_argument(
        "--result", type=Path, default=Path("benchmarks/results/verify_weights.json")
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rates = kernels()
    print("kernels in GB/s:", rates, flush=True)
    source, bundle = prepare(arguments.scratch, arguments.experts)
    shards = sorted(bundle.glob("*/*.safetensors"))
    own = sum(path.stat().st_size for path in shards)
    copied = sum(path.stat().st_size for path in shards if path.stat().st_nlink == 1)
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in _LEVELS}
    limits: dict[int, list[float]] = {depth: [] for depth in _DEPTHS}
    report = arguments.scratch / "verify_report.json"
    for number in range(arguments.runs):
        for depth in _DEPTHS:
            limits[depth].append(read_directly(shards, depth))
        print(f"run {number + 1}: limit", {d: round(r[-1] / 1e9, 2) for d, r in limits.items()})
        for name, level in _LEVELS.items():
            words = [*level, str(source)] if "--source" in level else level
            runs[name].append(verify(bundle, words, report))
            print(f"run {number + 1}: {name}", runs[name][-1], flush=True)
    limit = max(median(found) for found in limits.values())
    sizes = {"files": own, "weights": own, "source": own + copied}
    result = {
        "machine": machine(),
        "kernels_gb_per_second": rates,
        "limit_gb_per_second": {d: round(median(r) / 1e9, 3) for d, r in limits.items()},
        "rows": [row(name, found, sizes[name], limit) for name, found in runs.items()],
        "load_average": round(os.getloadavg()[0], 1),
    }
    text = json.dumps(result, indent=2, ensure_ascii=False)
    arguments.result.write_text(text + "\n")
    print(text)
    if not arguments.keep:
        shutil.rmtree(source)
        shutil.rmtree(bundle)
    report.unlink()


if __name__ == "__main__":
    main()
