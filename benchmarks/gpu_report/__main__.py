"""Tune and measure the GPU of this machine.

    python -m benchmarks.gpu_report --out DIR [--minutes 9]

Writes report.json to DIR after every row, the tuning table (in the user's cache folder too, where
verify_attention finds it), and plots. Kernels are timed by replays of CUDA graphs, each call on a
KV cache that the second-level cache does not hold. Needs torch, triton and matplotlib, nothing from
the network; without an installation, PYTHONPATH=.:runtime:kernels.
"""

from __future__ import annotations

import argparse
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor
from pathlib import Path

import torch

from benchmarks.attention_shapes import Shape
from benchmarks.gpu_report.decoding import Decoding
from benchmarks.gpu_report.device import CudaDevice, Device, facts_of
from benchmarks.gpu_report.matrix import Matrix, attention_shapes, stages_of
from benchmarks.gpu_report.plots import draw
from benchmarks.gpu_report.products import Products
from benchmarks.gpu_report.stages import Report
from benchmarks.gpu_report.tuning import Target, candidates

ROOT = Path(__file__).resolve().parents[2]
FOR_PLOTS = 0.97  # of the time that stages have; the rest is for plots and the end of a row


def whole_matrix(bundle: Path) -> Matrix:
    """Return the sizes of a report on a real device."""
    return Matrix(
        dtype=torch.bfloat16,
        copied_bytes=1 << 30,
        side=8192,
        launches=candidates(),
        targets=(
            Target(Shape(32, 8192, 1, 16), 16),
            Target(Shape(32, 8192, 2, 16), 32),
            Target(Shape(32, 8192, 4, 16), 64),
            Target(Shape(32, 8192, 2, 128), 64, last=True),
        ),
        attention=attention_shapes(),
        weights=[(2048, 7168), (7168, 2048), (18432, 7168)],
        products=Products([(4096, 7168), (7168, 2048)], (1, 16, 4, 64, 512), 64, 8),
        decoding=Decoding(bundle, ("bfloat16", "float32"), (1, 16), (1, 2, 3), 64),
    )


def write_report(
    device: Device,
    matrix: Matrix,
    folder: Path,
    *,
    seconds: float,
    executor: Executor,
    clock: Callable[[], float] = time.monotonic,
) -> Report:
    """Run the stages within the seconds, then draw them."""
    torch.manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    facts = facts_of(device) | {"commit": commit(), "seconds": seconds}
    report = Report(folder / "report.json", facts)
    report.run(
        stages_of(device, matrix, report, folder, executor), seconds * FOR_PLOTS, clock=clock
    )
    for path in draw(report, folder):
        print(path)
    return report


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
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("expected a GPU that torch can use, found none")
    spawn = multiprocessing.get_context("spawn")  # a fork would share this process's GPU
    with ProcessPoolExecutor(mp_context=spawn) as executor:
        report = write_report(
            CudaDevice(),
            whole_matrix(options.bundle),
            options.out,
            seconds=60 * options.minutes,
            executor=executor,
        )
    if report.failed:
        print(f"failed: {', '.join(report.failed)}; report.json says why", file=sys.stderr)
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
