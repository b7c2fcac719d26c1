"""Quantizing the MTP layer against cp of as many bytes and against the machine's limit, on the real
671B shapes, in one run.

    python -m benchmarks.make_checkpoint /data/v3 --real
    python -m benchmarks.bench_quantize /data/v3 /data/scratch

The MTP part alone: 11.5 G elements in linears. Rows, in turn, medians of --runs, the page cache
dropped before each (not with --warm) and `sync` counted in each:
  (a) fp8 -> weight_only_int8            (b) cp of half the bytes that (a) reads and writes
  (c) fp8 -> int4 experts, bf16 rest     (d) cp of half the bytes that (c) reads and writes
  (e), (f) the bytes of (a), (c) by direct I/O alone, as deep as is best in this run
cp reads and writes every byte, so it moves as many. The kernels alone run on every core with a
layer in memory; shares are those of the slower of the two limits (common/limits.py). Then
compressed-tensors quantizes and packs one expert's matrix, given the scales, for its seconds per
element beside the whole runs'. Peak memory is the kernel's figure for the process. Rates of the
kernels alone: bench_quantize_kernels.
--schemes measures some of SCHEMES (common/plans.py), int8 and int4 unless they are named, and
--without-cp leaves (b) and (d) out; a result file that is there keeps the others.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from benchmarks.common.limits import DiskLimit, DiskWork, elements, kernel_rates
from benchmarks.common.measure import Measured, cp_of_size, fresh, machine, mtp_shards
from benchmarks.common.plans import SCHEMES, options
from mtp_export.bundle.bundle_plan import BundlePlan
from mtp_export.bundle.quantize import plan_quantize

# The MTP module in int4 is not a pair of the table; its experts have the main layers' shapes.
_RUN = """
import sys
from pathlib import Path
from benchmarks.common.plans import options
from mtp_export.bundle.build import run_bundle
from mtp_export.bundle.quantize import plan_quantize
from mtp_export.progress import silent
source, output, scheme, group_size = sys.argv[1:]
run_bundle(plan_quantize(options(Path(source), Path(output), scheme, int(group_size))), silent)
"""


def compressed_tensors_seconds(plan: BundlePlan, runs: int) -> dict[str, float]:
    """Seconds per element of compressed-tensors on one expert's matrix, by name of the scheme."""
    # Not before: a process's peak memory, as the kernel counts it, begins at its parent's.
    from benchmarks.common.quantize_operations import by_compressed_tensors
    from mtp_kernels.quantize import Fp8Block, dequantize_fp8_block

    name = next(
        step.inputs[0] for step in plan.written_steps if ".experts.0.up_proj" in step.inputs[0]
    )
    checkpoint = plan.checkpoint
    fp8 = Fp8Block(checkpoint.tensor(name), checkpoint.tensor(f"{name}_scale_inv"))
    weights, _ = dequantize_fp8_block(fp8)
    result: dict[str, float] = {}
    for scheme, call in by_compressed_tensors(weights).items():
        call()
        seconds = []
        for _ in range(runs):
            start = perf_counter()
            call()
            seconds.append(perf_counter() - start)
        result[scheme] = median(seconds) / weights.numel()
    return result


def cases(
    plans: dict[str, BundlePlan], scratch: Path, group_size: int, cold: bool, with_cp: bool
) -> dict[str, Callable[[], Measured]]:
    """The rows by name."""
    rows: dict[str, Callable[[], Measured]] = {}
    output = str(scratch / "out/bundle")
    for scheme, plan in plans.items():
        source = plan.checkpoint.folder
        _, shards = mtp_shards(source)
        arguments = [str(source), output, SCHEMES[scheme], str(group_size)]
        rows[f"fp8 -> {scheme}"] = fresh([sys.executable, "-c", _RUN, *arguments], scratch, cold)
        if with_cp:
            copy = ["sh", "-c", cp_of_size(shards, DiskWork.of(plan).size_bytes // 2), output]
            rows[f"cp, the bytes of fp8 -> {scheme}"] = fresh(copy, scratch, cold)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=["int8", "int4"])
    parser.add_argument("--warm", action="store_true", help="leave the page cache alone")
    parser.add_argument("--without-cp", dest="with_cp", action="store_false")
    parser.add_argument("--result", type=Path, default=Path("benchmarks/results/quantize.json"))
    arguments = parser.parse_args()
    plans = {
        name: plan_quantize(
            options(arguments.source, arguments.scratch / "plan", scheme, arguments.group_size),
            dry_run=True,
        )
        for name, scheme in SCHEMES.items()
        if name in arguments.schemes
    }
    rows = cases(
        plans, arguments.scratch, arguments.group_size, not arguments.warm, arguments.with_cp
    )
    limits = {
        scheme: DiskLimit.of(DiskWork.of(plan), arguments.scratch) for scheme, plan in plans.items()
    }
    rows |= {f"direct I/O, the bytes of fp8 -> {name}": one.run for name, one in limits.items()}
    rates = kernel_rates([*plans])
    measured: dict[str, list[Measured]] = {name: [] for name in rows}
    for number in range(arguments.runs):
        for name, run in rows.items():
            measured[name].append(run())
            print(f"run {number + 1}: {name}: {measured[name][-1]}", flush=True)
    oracle = compressed_tensors_seconds(next(iter(plans.values())), arguments.runs)
    result = report(plans, measured, oracle)
    result |= shares(result, limits, rates)
    if arguments.result.exists():
        result = merged(json.loads(arguments.result.read_text()), result)
    arguments.result.parent.mkdir(parents=True, exist_ok=True)
    arguments.result.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    print(json.dumps(result, indent=2, ensure_ascii=False))
    for name, seconds in result["median_seconds"].items():
        share = result["shares"].get(name)
        print(f"{name:42} {seconds:7.2f} s", f"{share:.2f} of the limit" if share else "")


def shares(
    result: dict[str, Any], limits: dict[str, DiskLimit], rates: dict[str, float]
) -> dict[str, Any]:
    """Return the limits, and the shares of the slower of both that the runs reach."""
    seconds, found, facts = result["median_seconds"], {}, {}
    for scheme, limit in limits.items():
        kernels = result["elements"][scheme] / rates[scheme]
        disk = seconds[f"direct I/O, the bytes of fp8 -> {scheme}"]
        facts[scheme] = limit.facts() | {"kernels_seconds": round(kernels, 2)}
        found[f"fp8 -> {scheme}"] = round(max(disk, kernels) / seconds[f"fp8 -> {scheme}"], 3)
    return {"limits": facts, "shares": found}


def merged(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Return an earlier result with the new measurements in place of its own."""
    return {
        key: {**before[key], **value} if isinstance(value, dict) and key in before else value
        for key, value in now.items()
    }


def report(
    plans: dict[str, BundlePlan], measured: dict[str, list[Measured]], oracle: dict[str, float]
) -> dict[str, Any]:
    """Return the measurements, and the ratios that the targets are about."""
    seconds = {name: median(run.seconds for run in runs) for name, runs in measured.items()}
    ratios: dict[str, float] = {}
    for scheme, plan in plans.items():
        ours, copy = seconds[f"fp8 -> {scheme}"], seconds.get(f"cp, the bytes of fp8 -> {scheme}")
        if copy:
            ratios[f"{scheme} / cp (at most 1.5)"] = round(ours / copy, 3)
        if scheme in oracle:
            each = ours / elements(plan)
            ratios[f"compressed-tensors in memory / {scheme} with the disk, an element"] = round(
                oracle[scheme] / each, 3
            )
    return {
        "machine": machine(),
        "elements": {scheme: elements(plan) for scheme, plan in plans.items()},
        "bytes_in_and_out": {
            scheme: DiskWork.of(plan).size_bytes for scheme, plan in plans.items()
        },
        "runs": {name: [asdict(run) for run in runs] for name, runs in measured.items()},
        "median_seconds": {name: round(value, 2) for name, value in seconds.items()},
        "compressed_tensors_seconds_per_element": {
            name: seconds for name, seconds in oracle.items() if name in plans
        },
        "ratios": ratios,
    }


if __name__ == "__main__":
    main()
