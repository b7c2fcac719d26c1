"""Run as a script under TRITON_INTERPRET=1: a whole report of a tiny matrix, on a device that the
interpreter plays and whose clock is given.

    python interpreted_report.py FOLDER BUNDLE
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.attention_shapes import Shape
from benchmarks.gpu_report.__main__ import write_report
from benchmarks.gpu_report.decoding import Decoding
from benchmarks.gpu_report.device import Call
from benchmarks.gpu_report.matrix import Matrix, stages_of
from benchmarks.gpu_report.products import Products
from benchmarks.gpu_report.stages import Report, Stage
from benchmarks.gpu_report.tuning import Target
from mtp_kernels.gpu.devices import INTERPRETED, Gpu
from mtp_kernels.verify_attention.triton_choice import tiles_for
from mtp_kernels.verify_attention.triton_tuning import Launch

TOO_LARGE = Shape(64, 1 << 14, 1, 2)
BROKEN = Launch(24, 16, 4, 1, 1)  # no block of 24 rows exists
FASTEST = Launch(16, 16, 4, 1, 1)


@dataclass
class InterpretedDevice:
    """The CPU, each call of which seems to take as long as the last one before it, and a little."""

    device: torch.device = torch.device("cpu")
    gpu: Gpu = INTERPRETED
    free_bytes: int = 1 << 28
    timed: int = 0
    forgotten: int = 0

    def seconds(self, calls: Sequence[Call], *, captured: bool = True) -> float:
        for call in calls:
            call()
        self.timed += 1
        return 1e-3 + 1e-6 * self.timed

    def forget(self) -> None:
        self.forgotten += 1


@dataclass
class Sizes(Executor):
    """Stands for the processes that compile: one launch does not, one does not fit."""

    known: dict[Launch, int | None] = field(default_factory=dict)

    def submit(self, fn: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        _, _, launch, _ = arguments
        done = Future[Any]()
        done.set_result(self.known.get(launch, 1000))
        return done


def matrix(bundle: Path) -> Matrix:
    small = Shape(1, 32, 1, 2)
    return Matrix(
        dtype=torch.float16,
        copied_bytes=1 << 10,
        side=8,
        launches=[FASTEST, BROKEN, Launch(16, 128, 8, 4, 1), Launch(16, 64, 8, 4, 2)],
        targets=(
            Target(small, 16),
            Target(Shape(2, 40, 2, 9), 32),
            Target(Shape(1, 32, 1, 70), 64, last=True),
        ),
        attention=[small, Shape(1, 32, 2, 2), Shape(2, 32, 2, 2, ragged=True), TOO_LARGE],
        weights=[(8, 128)],
        products=Products([(32, 128)], (2,), 3, 2),
        decoding=Decoding(bundle, ("float32",), (1,), (1,), 3),
    )


def main(folder: Path, bundle: Path) -> int:
    sizes = Sizes({Launch(16, 128, 8, 4, 1): 1 << 20, Launch(16, 64, 8, 4, 1): None})
    device = InterpretedDevice()

    def stages(report: Report) -> list[Stage]:
        return stages_of(device, matrix(bundle), report, folder, lambda: sizes)

    report = write_report(device, stages, folder, seconds=3600.0, facts={"commit": "none"})
    assert device.forgotten > 0
    # What was tuned serves from now on: the launch that was timed first is the fastest.
    print("chosen", tiles_for(INTERPRETED, "16 bit"))
    return len(report.failed)


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
