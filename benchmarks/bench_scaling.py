"""Bundles made by 1 to N processes in shares, in memory and on a disk, beside the disk's limit.

    python -m benchmarks.bench_scaling measure /data/scratch     seconds by processes, in one run
    python -m benchmarks.bench_scaling page                      puts them into docs/distributed.md
    python -m benchmarks.bench_scaling paper                     the formula for a 671B conversion

Each process is `mtp-export quantize --share I/N --workers 1`; the time is that of all of them, of
`mtp-export finish` and of `sync`. In memory (/dev/shm) the kernels and the program alone limit it.
The disk's limit is the same bytes moved by direct I/O alone, as deep as is best in this run
(benchmarks/common/limits.py). The page cache is dropped before each run, which needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common.limits import DiskLimit, DiskWork
from benchmarks.common.measure import drop_caches, machine
from benchmarks.common.page_section import put_section
from benchmarks.make_checkpoint import REAL_CONFIG, make_checkpoint

_PROGRAM = [sys.executable, "-c", "from mtp_export.cli import main; main()"]
_SCHEMES = ("--base-quant", "weight_only_int8", "--mtp-quant", "weight_only_int8")
_LAYERS, _VOCABULARY = 4, 4096
_SHARD_BYTES = 128_000_000
RESULT, PAGE = Path("benchmarks/results/scaling.json"), Path("docs/distributed.md")
HEADING, FOLLOWING = "### Measured on one machine", "## Shared file systems"
_CPUS_PER_MACHINE = 16
PAPER_MACHINES = (1, 2, 4, 8, 16, 32, 64)
PAPER_STORAGE = (1e9, 5e9, 20e9, 100e9)


@dataclass(frozen=True)
class Conversion:
    """Bytes that a conversion moves, weights that it converts, and its shards."""

    read_bytes: float
    written_bytes: float
    elements: float
    shards: int


@dataclass(frozen=True)
class Machine:
    """Weights per second that a machine converts, and bytes per second that it moves."""

    elements_per_second: float
    bytes_per_second: float


# DeepSeek-V3 to a8w8_fp8_wint4 + a8w8_fp8, as planned; 1 G elements/s per core
# (docs/benchmarks.md), a network of 25 Gbit/s.
V3 = Conversion(692e9, 371e9, 655e9, 162)
NODE = Machine(_CPUS_PER_MACHINE * 1e9, 25e9 / 8)


def paper_seconds(
    work: Conversion, node: Machine, machines: int, storage: float, serial_seconds: float = 10.0
) -> float:
    """Return the seconds of a conversion by the formula of docs/distributed.md.

    storage is the bytes per second of the shared file system; serial_seconds are those of planning
    and of the end.
    """
    moved = work.read_bytes + work.written_bytes
    uneven = machines * ceil(work.shards / machines) / work.shards
    compute = uneven * work.elements / (machines * node.elements_per_second)
    network = uneven * moved / (machines * node.bytes_per_second)
    return serial_seconds + max(compute, network, moved / storage)


def paper() -> str:
    """Return the table of docs/distributed.md."""
    heads = " | ".join(f"{rate / 1e9:.0f} GB/s" for rate in PAPER_STORAGE)
    lines = [f"| machines | {heads} |", "|--:" * (1 + len(PAPER_STORAGE)) + "|"]
    for count in PAPER_MACHINES:
        cells = [f"{paper_seconds(V3, NODE, count, rate):,.0f} s" for rate in PAPER_STORAGE]
        lines.append(f"| {count} | {' | '.join(cells)} |")
    return "\n".join(lines)


def section(result: dict[str, Any]) -> str:
    """Return the section of docs/distributed.md about a measurement."""
    memory, disk = (result["places"][name] for name in ("memory", "disk"))
    limit, facts = median(disk["limit_seconds"]), result["machine"]
    seconds = {name: place["median_seconds"] for name, place in result["places"].items()}
    first = next(iter(seconds["memory"]))
    rows = [
        f"| {count} | {in_memory:.1f} s | {seconds['memory'][first] / in_memory:.2f} |"
        f" {on_disk:.1f} s | {on_disk / limit:.2f} |"
        for (count, in_memory), on_disk in zip(
            seconds["memory"].items(), seconds["disk"].values(), strict=True
        )
    ]
    runs = len(disk["limit_seconds"])
    return "\n".join(
        [
            HEADING,
            "",
            f"`python -m benchmarks.bench_scaling measure SCRATCH`, {facts['cpu']}, commit"
            f" {facts['commit'][:12]}: fp8 to int8, {memory['bytes'] / 1e9:.1f} GB in and out, by"
            f" processes of one worker\neach, medians of {runs}. In memory (`/dev/shm`) the kernels"
            f" alone limit it; on the disk nothing is faster than {limit:.1f} s,\nwhich direct I/O"
            " alone takes for the same bytes.",
            "",
            "| processes | in memory | times one process | on the disk | times the disk's limit |",
            "|--:|--:|--:|--:|--:|",
            *rows,
            "",
            "",
        ]
    )


def put_into(page: str, part: str) -> str:
    """Return the page with this section, once."""
    return put_section(page, part, heading=HEADING, following=FOLLOWING)


def make_source(folder: Path, experts: int) -> Path:
    """Write a checkpoint of V3's matrices with fewer layers and experts, in many shards."""
    config = REAL_CONFIG | {"n_routed_experts": experts, "vocab_size": _VOCABULARY}
    config |= {"num_hidden_layers": _LAYERS, "n_group": 1, "topk_group": 1}
    config |= {"num_experts_per_tok": min(experts, REAL_CONFIG["num_experts_per_tok"])}
    return make_checkpoint(folder, config, max_shard_bytes=_SHARD_BYTES, parted=False)


def command(source: Path, output: Path, *more: str) -> list[str]:
    """Return a quantization's command."""
    places = ("--input-dir", str(source), "--output-dir", str(output))
    return [*_PROGRAM, "quantize", *places, *_SCHEMES, "--quiet", "--workers", "1", *more]


def seconds_of(source: Path, output: Path, count: int) -> float:
    """Make a bundle in shares, each a process, and remove it."""
    drop_caches()
    start = time.perf_counter()
    shares = [f"{number}/{count}" for number in range(1, count + 1)]
    running = [subprocess.Popen(command(source, output, "--share", share)) for share in shares]
    codes = [process.wait() for process in running]
    if any(codes):
        raise SystemExit(f"a share of {output} failed")
    subprocess.run([*_PROGRAM, "finish", str(output), "--quiet"], check=True)
    os.sync()
    seconds = time.perf_counter() - start
    shutil.rmtree(output)
    return seconds


def work_of(source: Path) -> DiskWork:
    """Return the bytes that the conversion reads and writes."""
    from mtp_export.bundle.options import BundleOptions
    from mtp_export.bundle.quantize import QuantizeOptions, plan_quantize

    bundle = BundleOptions(source, source.with_name("none"))
    scheme = _SCHEMES[1]
    options = QuantizeOptions(bundle, base_quant=scheme, mtp_quant=scheme)
    return DiskWork.of(plan_quantize(options, dry_run=True))


def rows_in(place: Path, counts: list[int], runs: int, experts: int) -> dict[str, Any]:
    """Measure in one place: seconds of each run by the number of processes, one count after the
    other in every run."""
    source = make_source(place / "source", experts)
    seconds: dict[str, list[float]] = {str(count): [] for count in counts}
    seconds_of(source, place / "bundle", counts[0])  # compiles
    for _ in range(runs):
        for count in counts:
            seconds[str(count)].append(round(seconds_of(source, place / "bundle", count), 2))
            print(place, count, seconds[str(count)], flush=True)
    medians = {count: median(each) for count, each in seconds.items()}
    return {"bytes": work_of(source).size_bytes, "seconds": seconds, "median_seconds": medians}


def measure(scratch: Path, counts: list[int], runs: int, experts: int) -> dict[str, Any]:
    """Measure in memory and on the disk of a folder, and the disk's limit."""
    result: dict[str, Any] = {"machine": machine(), "places": {}}
    for name, parent in (("memory", Path("/dev/shm")), ("disk", scratch)):
        parent.mkdir(parents=True, exist_ok=True)
        place = Path(tempfile.mkdtemp(dir=parent))
        try:
            rows = rows_in(place, counts, runs, experts)
            if name == "disk":
                limit = DiskLimit.of(work_of(place / "source"), place)
                rows["limit_seconds"] = [round(limit.run().seconds, 2) for _ in range(runs)]
                rows["limit_depth"] = limit.depth
            result["places"][name] = rows
        finally:
            shutil.rmtree(place)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    actions = parser.add_subparsers(dest="action", required=True)
    actions.add_parser("paper")
    actions.add_parser("page")
    measured = actions.add_parser("measure")
    measured.add_argument("scratch", type=Path)
    measured.add_argument("--shares", type=int, nargs="+", default=[1, 2, 4])
    measured.add_argument("--runs", type=int, default=3)
    measured.add_argument("--experts", type=int, default=8)
    measured.add_argument("--result", type=Path, default=RESULT)
    given = parser.parse_args()
    if given.action == "paper":
        print(paper())
        return
    if given.action == "page":
        PAGE.write_text(put_into(PAGE.read_text(), section(json.loads(RESULT.read_text()))))
        return
    result = measure(given.scratch, given.shares, given.runs, given.experts)
    given.result.parent.mkdir(parents=True, exist_ok=True)
    given.result.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
