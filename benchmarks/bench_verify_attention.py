"""Time verification attention: fused groups against the same queries as requests of their own.

    PYTHONPATH=kernels python benchmarks/bench_verify_attention.py --backend torch_cpu
    PYTHONPATH=kernels python benchmarks/bench_verify_attention.py --backend compiled_cpu
    PYTHONPATH=kernels python benchmarks/bench_verify_attention.py --backend triton_cuda

CPU: medians over interleaved calls, beside torch's scaled_dot_product_attention with the gather of
the pages it needs. CUDA: medians of CUDA graph replays, the share of a copy's bandwidth measured
in the same run, and batch expansion with a group's rows adjacent and far apart. Every call of a
measurement goes to another of four caches, so that none finds its tokens in a processor's cache.
Results go to benchmarks/results/ as JSON and a plot, on a CPU by the name of its fastest bf16 unit.
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
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import torch

from mtp_kernels.verify_attention import make_workspace, verify_attention
from mtp_kernels.verify_attention.bf16_units import units_here

matplotlib.use("Agg")
RESULTS = Path(__file__).parent / "results"
LATENT, ROPE, PAGE, POOLS = 512, 64, 64, 4
WIDTH = LATENT + ROPE


@dataclass(frozen=True)
class Shape:
    """One batch: b requests of n queries and h heads over about `tokens` cached tokens each."""

    batch: int
    tokens: int
    queries: int
    heads: int
    ragged: bool = False  # lengths drawn from a normal distribution, N(tokens, tokens / 2)


def kv_lens_of(shape: Shape) -> torch.Tensor:
    lengths = torch.full((shape.batch,), float(shape.tokens))
    if shape.ragged:
        generator = torch.Generator().manual_seed(0)
        lengths = lengths + torch.randn(shape.batch, generator=generator) * shape.tokens / 2
    return lengths.clamp(min=shape.queries).to(torch.int32)


def pools_of(shape: Shape, device: str) -> list[dict[str, Any]]:
    """Return the arguments of the fused call, once for each cache."""
    kv_lens = kv_lens_of(shape)
    width = -(-int(kv_lens.amax()) // PAGE)
    rows, pages = shape.batch * shape.queries, shape.batch * width
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
    return [
        {
            "q_latent": torch.randn(rows, shape.heads, LATENT, **options),
            "q_rope": torch.randn(rows, shape.heads, ROPE, **options),
            "kv_cache": torch.randn(pages, PAGE, WIDTH, **options),
            "page_table": torch.randperm(pages, dtype=torch.int32).view(-1, width).to(device),
            "kv_lens": kv_lens.to(device),
            "cu_q": (torch.arange(shape.batch + 1, dtype=torch.int32) * shape.queries).to(device),
            "scale": WIDTH**-0.5,
        }
        for _ in range(POOLS)
    ]


def expanded(arguments: dict[str, Any], shape: Shape, adjacent: bool) -> dict[str, Any]:
    """Expand the batch: every query a request; a group's rows side by side, or b rows apart."""
    rows = torch.arange(shape.batch * shape.queries)
    if not adjacent:
        rows = rows.view(shape.batch, shape.queries).t().flatten()
    owner, position = rows // shape.queries, rows % shape.queries
    device = arguments["q_latent"].device
    kv_lens = arguments["kv_lens"].cpu()[owner] - (shape.queries - 1 - position).to(torch.int32)
    return arguments | {
        "q_latent": arguments["q_latent"][rows.to(device)],
        "q_rope": arguments["q_rope"][rows.to(device)],
        "page_table": arguments["page_table"][owner.to(device)],
        "kv_lens": kv_lens.to(torch.int32).to(device),
        "cu_q": torch.arange(len(rows) + 1, dtype=torch.int32).to(device),
    }


def calls_of(pools: list[dict[str, Any]], max_q_len: int, backend: str) -> list[Callable[[], Any]]:
    """Return one call per cache, sharing a workspace and outputs, as an engine's layers would."""
    first = pools[0]
    query, cache = first["q_latent"], first["kv_cache"]
    workspace = make_workspace(
        batch=len(first["kv_lens"]), queries=len(query), max_q_len=max_q_len,
        kv_tokens=first["page_table"].shape[1] * PAGE, heads=query.shape[1], page=PAGE,
        dtype=query.dtype, device=cache.device, backend=backend,
    )  # fmt: skip
    out = (torch.empty_like(query), query.new_empty(query.shape[:2], dtype=torch.float32))
    options = {"workspace": workspace, "out": out, "backend": backend}
    return [partial(verify_attention, **pool, **options) for pool in pools]


def sdpa_call(
    arguments: dict[str, Any], shape: Shape, gathered: torch.Tensor, folded: bool
) -> Callable[[], Any]:
    """Gather one request's pages, then torch's attention; `folded` gives it our block of rows.

    The cached token serves as key and value, 576 wide: torch takes keys and values of one width
    on its fast path only, and the output's last 64 columns are cut off.
    """
    n, h, tokens = shape.queries, shape.heads, shape.tokens
    pages = arguments["page_table"][0]
    query = torch.cat([arguments["q_latent"], arguments["q_rope"]], -1)  # [s, h, c+r]
    query = query.view(1, 1, n * h, WIDTH) if folded else query.transpose(0, 1)[None].contiguous()
    limits = tokens - n + 1 + torch.arange(n)
    mask = torch.zeros(n, tokens, dtype=torch.bfloat16)
    mask.masked_fill_(torch.arange(tokens) >= limits[:, None], -torch.inf)
    mask = mask.repeat_interleave(h, 0)[None, None] if folded else mask[None, None]

    def call() -> torch.Tensor:
        torch.index_select(arguments["kv_cache"], 0, pages, out=gathered)
        key = gathered.view(1, 1, -1, WIDTH)[:, :, :tokens]
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, key, attn_mask=None if n == 1 else mask, scale=arguments["scale"],
            enable_gqa=not folded,
        )[..., :LATENT]  # fmt: skip

    return call


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


def graph_seconds(calls: list[Callable[[], Any]], replays: int) -> float:
    """Return median seconds of a call: graphs of one call to each cache, replayed."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    seconds = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3 / len(calls))
    return statistics.median(seconds)


def copy_bytes_per_second() -> float:
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / graph_seconds([lambda: target.copy_(source)] * POOLS, 10)


def bench_cuda(replays: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    bandwidth = copy_bytes_per_second()
    print(f"copy: {bandwidth / 1e9:.0f} GB/s read and written")
    shapes = [
        Shape(b, tokens, n, h, ragged)
        for ragged in (False, True)
        for h in (16, 128)
        for b in (1, 8, 32, 128)
        for tokens in ((1024, 4096, 8192, 32768) if not ragged else (8192,))
        for n in (1, 2, 3, 4, 6)
    ]
    first_seconds = 0.0
    for shape in shapes:
        pools = pools_of(shape, "cuda")
        fused = graph_seconds(calls_of(pools, shape.queries, "triton_cuda"), replays)
        near, far = (
            graph_seconds(
                calls_of([expanded(p, shape, adjacent) for p in pools], 1, "triton_cuda"), replays
            )
            for adjacent in (True, False)
        )
        first_seconds = fused if shape.queries == 1 else first_seconds
        tokens = int(kv_lens_of(shape).sum())
        kv_bytes = tokens * WIDTH * 2
        flops = 2 * shape.queries * shape.heads * (WIDTH + LATENT) * tokens
        row = asdict(shape) | {
            "fused_us": fused * 1e6,
            "expanded_adjacent_us": near * 1e6,
            "expanded_apart_us": far * 1e6,
            "floor_us": kv_bytes / bandwidth * 1e6,
            "kv_gb_per_second": kv_bytes / fused / 1e9,
            "tflops": flops / fused / 1e12,
            "share_of_copy": kv_bytes / fused / bandwidth,
            "gain_adjacent": near / fused,
            "gain_apart": far / fused,
            "over_one_query": fused / first_seconds,
        }
        show(row)
        rows.append(row)
        del pools
        torch.cuda.empty_cache()
    return rows


def show(row: dict[str, Any]) -> None:
    print(" ".join(f"{k}={v:.2f}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()))


def plot(rows: list[dict[str, Any]], path: Path, cuda: bool) -> None:
    """Plot time against n; on CUDA also the share of the copy's bandwidth against batch."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2 if cuda else 1, figsize=(11 if cuda else 6, 4), squeeze=False)
    names = ["fused", *(["expanded_adjacent", "expanded_apart"] if cuda else ["expanded"])]
    names += [] if cuda else ["sdpa_rows"]
    chosen = [row for row in rows if row["heads"] == 16 and not row["ragged"]]
    if cuda:
        chosen = [row for row in chosen if row["tokens"] == 8192]
    largest = max(row["batch"] for row in chosen)
    for name in [*names, "floor"]:
        line = [row for row in chosen if row["batch"] == largest]
        style = "k--" if name == "floor" else "o-"
        axes[0][0].plot(
            [row["queries"] for row in line], [row[f"{name}_us"] for row in line], style, label=name
        )
    tokens = chosen[0]["tokens"]
    axes[0][0].set(xlabel="queries a request (n)", ylabel="µs", ylim=0)
    axes[0][0].set_title(f"b {largest}, L {tokens}, h 16, bf16")
    axes[0][0].legend()
    if cuda:
        for n in (1, 2, 4, 6):
            line = [row for row in chosen if row["queries"] == n]
            axes[0][1].plot(
                [row["batch"] for row in line], [row["share_of_copy"] for row in line], "o-",
                label=f"n {n}",
            )  # fmt: skip
        axes[0][1].set(xlabel="batch", ylabel="share of a copy's bandwidth", xscale="log", ylim=0)
        axes[0][1].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def hardware(cuda: bool) -> dict[str, Any]:
    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line]
    fields = {key.strip(): value.strip() for key, value in (line.split(":", 1) for line in cpu)}
    found = {
        "cpu": fields.get("model name", platform.processor()),
        "threads": torch.get_num_threads(),
        "bf16_unit": units_here()[0],
        "load_average": os.getloadavg()[0],
    }
    return found | ({"gpu": torch.cuda.get_device_name()} if cuda else {})


def versions(cuda: bool) -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    if cuda:
        import triton

        found["triton"] = triton.__version__
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    backends = ["torch_cpu", "compiled_cpu", "triton_cuda"]
    parser.add_argument("--backend", choices=backends, required=True)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    cuda = options.backend == "triton_cuda"
    if cuda and not torch.cuda.is_available():
        parser.error("triton_cuda: expected a CUDA device, found none")
    torch.manual_seed(0)
    rows = bench_cuda(options.rounds) if cuda else bench_cpu(options.backend, options.rounds)
    git = ["git", "-C", str(RESULTS), "describe", "--always", "--dirty", "--abbrev=12"]
    commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    result = {
        "hardware": hardware(cuda),
        "versions": versions(cuda),
        "commit": commit,
        "backend": options.backend,
        "rounds": options.rounds,
        "rows": rows,
    }
    name = f"verify_attention_{options.backend}" + ("" if cuda else f"_{units_here()[0]}")
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    plot(rows, RESULTS / f"{name}.png", cuda)


if __name__ == "__main__":
    main()
