"""Time verification attention: fused groups against the same queries as requests of their own.

    PYTHONPATH=kernels python -m benchmarks.bench_verify_attention --backend torch_cpu
    PYTHONPATH=kernels python -m benchmarks.bench_verify_attention --backend compiled_cpu

Medians over interleaved calls on a CPU, beside torch's scaled_dot_product_attention with the gather
of the pages it needs. Every call of a measurement goes to another of four caches, so that none
finds its tokens in a processor's cache. Results go to benchmarks/results/ as JSON and a plot, by
the name of the CPU's fastest bf16 unit. benchmarks/gpu_report measures on a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import torch

from benchmarks.common.attention_shapes import POOLS, Shape, calls_of, expanded, pools_of, sdpa_call
from mtp_kernels.verify_attention.bf16_units import units_here

matplotlib.use("Agg")
RESULTS = Path(__file__).parent / "results"


def interleaved_medians(calls: dict[str, list[Callable[[], Any]]], rounds: int) -> dict[str, float]:
    """Return median seconds of each call, taking turns.

    A call on another cache goes before each, untimed, as another layer's would, so that no
    contestant pays for the memory and the pages that the one before it took.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds):
        names = list(calls) if turn % 2 else list(reversed(calls))
        for place, name in enumerate(names):
            call = calls[name][(turn + place) % POOLS]  # not the cache the one before it has read
            calls[name][(turn + place - 1) % POOLS]()
            start = time.perf_counter()
            call()
            if turn >= POOLS:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def bench_cpu(backend: str, rounds: int) -> list[dict[str, Any]]:
    rows = []
    for heads in (16, 128):
        for queries in (1, 2, 4, 6):
            shape = Shape(1, 4096, queries, heads)
            pools = pools_of(shape, "cpu")
            gathered = torch.empty_like(pools[0]["kv_cache"])
            contestants = {
                "fused": calls_of(pools, queries, backend),
                "expanded": calls_of([expanded(pool, shape, True) for pool in pools], 1, backend),
                "sdpa_rows": [sdpa_call(pool, shape, gathered, True) for pool in pools],
            }
            # On its own: torch copies the keys for every head, which slows the next contestant.
            by_heads = {"sdpa_heads": [sdpa_call(pool, shape, gathered, False) for pool in pools]}
            turns = rounds if heads == 16 else max(2 * POOLS, rounds // 4)
            medians = interleaved_medians(contestants, turns)
            medians |= interleaved_medians(by_heads, 2 * POOLS)
            # Floor: reading the cache once; a copy of as many bytes reads and writes.
            copies = [torch.empty_like(pool["kv_cache"]) for pool in pools]
            copying = [
                partial(copy.copy_, pool["kv_cache"])
                for copy, pool in zip(copies, pools, strict=True)
            ]
            floor = interleaved_medians({"copy": copying}, rounds)["copy"] / 2
            row = asdict(shape) | {f"{name}_us": s * 1e6 for name, s in medians.items()}
            row |= {"floor_us": floor * 1e6, "gain": medians["expanded"] / medians["fused"]}
            show(row)
            rows.append(row)
    return rows


def show(row: dict[str, Any]) -> None:
    print(" ".join(f"{k}={v:.2f}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()))


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Plot time against n."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4))
    line = [row for row in rows if row["heads"] == 16]
    for name in ("fused", "expanded", "sdpa_rows", "floor"):
        style = "k--" if name == "floor" else "o-"
        axes.plot(
            [row["queries"] for row in line], [row[f"{name}_us"] for row in line], style, label=name
        )
    axes.set(xlabel="queries a request (n)", ylabel="µs", ylim=0)
    axes.set_title(f"b {line[0]['batch']}, L {line[0]['tokens']}, h 16, bf16")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def hardware() -> dict[str, Any]:
    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line]
    fields = {key.strip(): value.strip() for key, value in (line.split(":", 1) for line in cpu)}
    return {
        "cpu": fields.get("model name", platform.processor()),
        "threads": torch.get_num_threads(),
        "bf16_unit": units_here()[0],
        "load_average": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=["torch_cpu", "compiled_cpu"], required=True)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    rows = bench_cpu(options.backend, options.rounds)
    git = ["git", "-C", str(RESULTS), "describe", "--always", "--dirty", "--abbrev=12"]
    commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    result = {
        "hardware": hardware(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "commit": commit,
        "backend": options.backend,
        "rounds": options.rounds,
        "rows": rows,
    }
    name = f"verify_attention_{options.backend}_{units_here()[0]}"
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    plot(rows, RESULTS / f"{name}.png")


if __name__ == "__main__":
    main()
