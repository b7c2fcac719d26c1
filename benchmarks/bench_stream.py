"""The streamed check at DeepSeek-V3's widths, against reading the same bytes, in one run.

    python -m benchmarks.bench_stream /data/stream --prepare   a checkpoint and its bundle: 22 GB
    python -m benchmarks.bench_stream /data/stream

The model has hidden size 7168, --experts experts of 3584 in a sparse layer (9.9 GB in fp8), one
dense layer and --layers - 1 sparse ones, and the MTP layer; its vocabulary is short, so that layers
fill the disk. In turn, the page cache dropped before each (needs root):
  reading   all weights of a sparse layer by direct reads, eight at a time
  check     the whole check on four prompts of 24 tokens: seconds per layer and in all, bytes read
            and memory added, each beside what the check says beforehand
  pass      the main layers alone with 1,024 tokens in eight texts
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.common.measure import drop_caches, machine
from benchmarks.make_checkpoint import REAL_CONFIG, make_checkpoint

_SHARD_BYTES = 2_000_000_000
_PIECE_BYTES = 16 << 20
_READERS = 8
_TEXTS = {"check": (4, 24), "pass": (8, 128)}


def config_of(layers: int, experts: int, vocab: int) -> dict[str, Any]:
    """Return a config of V3's widths with few layers, of experts twice as wide and half as many."""
    return REAL_CONFIG | {
        "num_hidden_layers": layers,
        "first_k_dense_replace": 1,
        "n_routed_experts": experts,
        "moe_intermediate_size": 3584,
        "vocab_size": vocab,
    }


def prepare(folder: Path, config: dict[str, Any]) -> None:
    """Write the checkpoint, and a bundle that links to it."""
    make_checkpoint(
        folder / "source", config, own_copies=False, max_shard_bytes=_SHARD_BYTES, parted=False
    )
    export = [sys.executable, "-m", "mtp_export", "--input-dir", str(folder / "source")]
    export += ["--output-dir", str(folder / "bundle"), "--link", "hardlink", "--quiet"]
    subprocess.run(export, check=True)


def tensors_of_layer(folder: Path, layer: int) -> list[Any]:
    """Return where the tensors of a main layer lie."""
    from mtp_checkpoints.tensors.reader import Checkpoint

    tensors = Checkpoint.open(folder / "bundle/main").tensors.values()
    return [one for one in tensors if one.name.startswith(f"model.layers.{layer}.")]


def read_layer(folder: Path, layer: int) -> dict[str, float]:
    """Read a layer's bytes directly, several pieces at a time, and forget them."""
    from mtp_checkpoints.sources.direct_io import PAGE_BYTES, page_memory

    pieces = []
    for one in tensors_of_layer(folder, layer):
        first = one.offset_bytes // PAGE_BYTES * PAGE_BYTES
        end = -(-(one.offset_bytes + one.size_bytes) // PAGE_BYTES) * PAGE_BYTES
        pieces += [
            (str(one.path), at, min(_PIECE_BYTES, end - at))
            for at in range(first, end, _PIECE_BYTES)
        ]

    def read(piece: tuple[str, int, int]) -> int:
        path, start, size = piece
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            return os.preadv(fd, [memory.setdefault(os_thread(), fresh())[:size]], start)
        finally:
            os.close(fd)

    import threading

    os_thread, memory = threading.get_ident, dict[int, memoryview]()

    def fresh() -> memoryview:
        return page_memory(_PIECE_BYTES)

    drop_caches()
    start = time.perf_counter()
    with ThreadPoolExecutor(_READERS) as pool:
        size = sum(pool.map(read, pieces))
    return {"bytes": size, "seconds": round(time.perf_counter() - start, 2)}


def resident(kind: str) -> int:
    """Return a size of this process by its name in /proc."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(kind))


def bytes_read() -> int:
    """Return the bytes that this process asked for, whether or not a cache had them."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("rchar")))


def write_prompts(path: Path, texts: int, tokens: int, vocab: int) -> None:
    """Write texts of spread tokens."""
    lines = [
        json.dumps(
            {"prompt_token_ids": [(7919 * (t * tokens + i) + 3) % vocab for i in range(tokens)]}
        )
        for t in range(texts)
    ]
    path.write_text("\n".join(lines))


def measured(folder: Path, row: str) -> dict[str, Any]:
    """Run the check, or its pass through the main layers alone, in this process."""
    from mtp_export.verify.check import Level
    from mtp_export.verify.context import Context
    from mtp_export.verify.decoding import stream, stream_cost
    from mtp_export.verify.options import VerifyOptions
    from mtp_runtime.streaming import open_streamed

    times: list[float] = []

    @contextlib.contextmanager
    def show(title: str, total: int) -> Iterator[Any]:
        yield lambda done: times.append(time.perf_counter())

    prompts = folder / f"{row}.jsonl"
    config = json.loads((folder / "bundle/main/config.json").read_text())
    write_prompts(prompts, *_TEXTS[row], vocab=config["vocab_size"])
    options = VerifyOptions(
        folder / "bundle", None, Level.RUN, prompts, stream=True, workdir=folder / "state"
    )
    context = Context.open(options, show)
    streamed = open_streamed(options.bundle, "cpu")
    stream_cost.probed(streamed, stream_cost.Sizes.of(context, streamed))  # compiles the kernels
    del streamed
    drop_caches()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from what is resident now
    before, already, start = resident("VmRSS"), bytes_read(), time.perf_counter()
    if row == "check":
        cost: dict[str, Any] = {}
        for item in stream.run(context):
            cost = cost or dict(item.data)
            print(f"{time.perf_counter() - start:.1f} s: {item.name}", file=sys.stderr)
    else:
        streamed, (texts, _) = open_streamed(options.bundle, "cpu"), stream.texts_of(context)
        found = stream_cost.cost_of(context, streamed, texts)
        cost = found.as_json()
        stream.states_of(
            context, streamed, texts, found, lambda done: times.append(time.perf_counter())
        )
    return {
        "seconds": round(time.perf_counter() - start, 2),
        "layer_seconds": [round(b - a, 2) for a, b in zip(times, times[1:], strict=False)],
        "read_bytes": bytes_read() - already,
        "memory_bytes": resident("VmHWM") - before,
        "resident_bytes": resident("VmHWM"),
        "said": cost,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prepare", action="store_true", help="write the checkpoint and stop")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--rows", nargs="*", default=["reading", "check", "pass"])
    parser.add_argument("--in-process", choices=_TEXTS, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, default=Path("benchmarks/results/stream.json"))
    arguments = parser.parse_args()
    folder = arguments.folder
    if arguments.prepare:
        prepare(folder, config_of(arguments.layers, arguments.experts, arguments.vocab))
        return
    if arguments.in_process:
        print(json.dumps(measured(folder, arguments.in_process)))
        return
    rows: dict[str, Any] = {}
    for row in arguments.rows:
        if row == "reading":
            rows[row] = read_layer(folder, arguments.layers - 1)
        else:
            command = [sys.executable, "-m", "benchmarks.bench_stream", str(folder)]
            command += ["--in-process", row]
            rows[row] = json.loads(subprocess.check_output(command))
        print(row, json.dumps(rows[row]), flush=True)
    result = {"machine": machine(), "rows": rows}
    arguments.result.parent.mkdir(parents=True, exist_ok=True)
    arguments.result.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
