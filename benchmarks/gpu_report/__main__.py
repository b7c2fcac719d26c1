"""Tune and measure the GPU of this machine.

    python -m benchmarks.gpu_report --out DIR [--minutes 9]

Writes report.json to DIR after every row, the tuning table (in the user's cache folder too, where
verify_attention finds it), and plots where matplotlib is. Every stage is a process: one that fails
or hangs costs no other. Kernels are timed by replays of CUDA graphs, each call on a KV cache that
the second-level cache does not hold. Needs torch, triton and numpy, nothing from the network;
without an installation, PYTHONPATH=.:runtime:checkpoints:kernels.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_report.apart import compiling_processes, rows_apart
from benchmarks.gpu_report.device import CudaDevice, Device, facts_of
from benchmarks.gpu_report.matrix import stages_of, whole_matrix
from benchmarks.gpu_report.plots import draw
from benchmarks.gpu_report.stages import Report, Row, Stage

ROOT = Path(__file__).resolve().parents[2]
FOR_PLOTS = 0.97  # of the time that stages have; the rest is for plots and the end of a row


def write_report(
    device: Device,
    stages: Callable[[Report], Sequence[Stage]],
    folder: Path,
    *,
    seconds: float,
    facts: dict[str, Any],
    clock: Callable[[], float] = time.monotonic,
) -> Report:
    """Run the stages within the seconds, then draw them."""
    folder.mkdir(parents=True, exist_ok=True)
    report = Report(folder / "report.json", facts_of(device) | facts | {"seconds": seconds})
    report.save()
    report.run(stages(report), seconds * FOR_PLOTS, clock=clock)
    for path in draw(report, folder):
        print(path)
    return report


def stages_apart(bundle: Path, folder: Path, seconds: float, report: Report) -> list[Stage]:
    """Return the stages on the GPU, each of whose rows a process makes."""
    end = time.monotonic() + seconds

    def left() -> float:
        return end - time.monotonic()

    def apart(stage: Stage) -> Stage:
        arguments = stage.name, bundle, folder, report
        return replace(stage, rows=lambda: rows_apart(rows_on_gpu, arguments, seconds_left=left))

    return [apart(stage) for stage in stages_on_gpu(bundle, folder, report)]


def rows_on_gpu(name: str, bundle: Path, folder: Path, report: Report) -> Iterator[Row]:
    """Yield a stage's rows in this process."""
    torch.manual_seed(0)
    stages = stages_on_gpu(bundle, folder, report)
    yield from next(stage for stage in stages if stage.name == name).rows()


def stages_on_gpu(bundle: Path, folder: Path, report: Report) -> list[Stage]:
    return stages_of(CudaDevice(), whole_matrix(bundle), report, folder, compiling_processes)


def commit() -> str:
    """Return the commit of this checkout, or that there is none."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "not a git checkout"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gpu_report", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--bundle", type=Path, default=ROOT / "fixtures/deepseek-v3-tiny")
    parser.add_argument("--commit", help="of this copy, where git cannot say it")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("expected a GPU that torch can use, found none")
    seconds = 60 * options.minutes
    report = write_report(
        CudaDevice(),
        partial(stages_apart, options.bundle, options.out, seconds),
        options.out,
        seconds=seconds,
        facts={"commit": options.commit or commit(), "date": date.today().isoformat()},
    )
    if report.failed:
        print(f"failed: {', '.join(report.failed)}; report.json says why", file=sys.stderr)
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
