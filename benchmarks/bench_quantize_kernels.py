"""Rates of the CPU quantization kernels, one core, beside a copy and beside compressed-tensors.

    python benchmarks/bench_quantize_kernels.py

Writes benchmarks/results/quantize_kernels_cpu.json. A result's bandwidth counts the bytes an
operation must read and write; its share is of a copy of the same run. One worker's rates, the
copy and compressed-tensors are timed in CPU seconds of their thread, so that other processes do
not count; two workers are timed by the clock, the load average beside them.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

from benchmarks.common.quantize_operations import by_compressed_tensors, operations  # noqa: E402
from mtp_kernels.cpu.jit import compiled  # noqa: E402
from mtp_kernels.quantize.cpu_numbers import from_e4m3  # noqa: E402

SHAPES = [(2048, 7168), (7168, 2048)]  # gate/up and down projection of a V3 expert
REPEATS = 7
OUT = ROOT / "benchmarks/results/quantize_kernels_cpu.json"


def median_seconds(
    run: Callable[[], object],
    repeats: int = REPEATS,
    clock: Callable[[], float] = time.thread_time,
) -> float:
    run()
    seconds = []
    for _ in range(repeats):
        start = clock()
        run()
        seconds.append(clock() - start)
    return statistics.median(seconds)


def copy_bytes_per_second() -> float:
    """Measure bytes read plus written by one thread, in a buffer far beyond the L2."""
    source = torch.ones(1 << 28, dtype=torch.uint8)
    target = torch.zeros_like(source)
    return 2 * source.numel() / median_seconds(lambda: target.copy_(source))


def two_workers(run: Callable[[], object]) -> float:
    """Measure seconds of one call when two threads make two calls at once."""

    def both() -> None:
        with ThreadPoolExecutor(2) as pool:
            for future in [pool.submit(run) for _ in range(4)]:
                future.result()

    return median_seconds(both, clock=time.perf_counter) / 4


def decoders() -> dict[str, float]:
    """Measure e4m3 to fp32 by a table of 256 and by bit operations, in cache, Gelem/s."""
    table = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    codes = np.random.default_rng(0).integers(0, 127, (2048, 7168), dtype=np.uint8)
    out = np.empty(codes.shape[1], np.float32)

    @compiled
    def by_table(codes: Any, out: Any, table: Any) -> None:
        for row in range(codes.shape[0]):
            values = codes[row]
            for k in range(values.size):
                out[k] = table[values[k]]

    @compiled
    def by_bits(codes: Any, out: Any) -> None:
        for row in range(codes.shape[0]):
            values = codes[row]
            for k in range(values.size):
                out[k] = from_e4m3(values[k])

    return {
        "table": codes.size / median_seconds(lambda: by_table(codes, out, table)) / 1e9,
        "bit operations": codes.size / median_seconds(lambda: by_bits(codes, out)) / 1e9,
    }


def measure(shape: tuple[int, int], copy: float) -> list[dict[str, object]]:
    weights = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.02
    oracle = {name: median_seconds(run, 3) for name, run in by_compressed_tensors(weights).items()}
    results: list[dict[str, object]] = []
    for name, (bytes_each, run) in operations(weights).items():
        seconds = median_seconds(run)
        rate = weights.numel() / seconds
        result: dict[str, object] = {
            "operation": name,
            "shape": shape,
            "gelem_per_second_one_worker": round(rate / 1e9, 3),
            "gelem_per_second_two_workers": round(weights.numel() / two_workers(run) / 1e9, 3),
            "gigabytes_per_second": round(rate * bytes_each / 1e9, 2),
            "share_of_copy": round(rate * bytes_each / copy, 3),
        }
        target = name.split(" -> ")[1]
        if target in oracle:
            result["times_compressed_tensors"] = round(oracle[target] / seconds, 1)
            result["compressed_tensors_gelem"] = round(weights.numel() / oracle[target] / 1e9, 4)
        results.append(result)
        print(json.dumps(result), flush=True)
    return results


def hardware() -> dict[str, object]:
    names = [
        line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return {"cpu": names[0].split(": ")[1], "cores": len(names), "machine": platform.machine()}


def main() -> None:
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    copy = copy_bytes_per_second()
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    packages = ("torch", "numba", "llvmlite", "numpy", "compressed-tensors")
    report = {
        "hardware": hardware(),
        "versions": {"python": platform.python_version()} | {p: version(p) for p in packages},
        "commit": commit,
        "repeats": REPEATS,
        "load_average_before": load,
        "copy_gigabytes_per_second": round(copy / 1e9, 2),
        "e4m3_decoding_gelem_per_second": {k: round(v, 2) for k, v in decoders().items()},
        "results": [result for shape in SHAPES for result in measure(shape, copy)],
    }
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
