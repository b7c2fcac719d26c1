"""Limits of a run: the seconds that the disk alone takes, and those that the kernels alone take.

    python -m benchmarks.common.limits rate SOURCE NAME   elements per second of a conversion
    python -m benchmarks.common.limits work SOURCE NAME   bytes that it moves, and elements

The disk's is the same bytes moved by direct_loop.py, as deep as is best in this run; the
kernels' are the same conversions on every core, of a smaller layer in memory (/dev/shm, 2 GB).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.common.measure import Measured, fresh

if TYPE_CHECKING:
    from mtp_export.bundle.bundle_plan import BundlePlan

DEPTHS = (2, 4, 8, 16)
_SAMPLE = 8  # the best depth is looked for with an eighth of the bytes
_EXPERTS, _VOCABULARY = 32, 4096  # of the layer in memory
_PASSES = 3
Span = tuple[str, int, int]


@dataclass(frozen=True)
class DiskWork:
    """Bytes of files that a run reads, [path, start, end), and the number of those it writes."""

    reads: tuple[Span, ...]
    write_bytes: int

    @classmethod
    def of(cls, plan: BundlePlan) -> DiskWork:
        """Return the work of a plan: every byte that it needs once."""
        from mtp_export.bundle.downloads import tensors_read

        jobs = tensors_read(plan.parts, plan.checkpoint.tensors, plan.tied).values()
        tensors = {tensor.name: tensor for job in jobs for read in job for tensor in read}
        spans = sorted(
            (str(one.path), one.offset_bytes, one.offset_bytes + one.size_bytes)
            for one in tensors.values()
        )
        return cls(tuple(_joined(spans)), plan.written_bytes)

    @property
    def size_bytes(self) -> int:
        """Bytes in and out."""
        return self.write_bytes + sum(end - start for _, start, end in self.reads)

    def sample(self) -> DiskWork:
        """Return a part of the work, of the same proportions."""
        reads = tuple(
            (path, start, start + -(-(end - start) // _SAMPLE)) for path, start, end in self.reads
        )
        return DiskWork(reads, self.write_bytes // _SAMPLE)

    def command(self, scratch: Path, depth: int) -> list[str]:
        """Return the command that does the work and nothing else, and writes below scratch/out."""
        spec = {"reads": self.reads, "write_bytes": self.write_bytes}
        scratch.mkdir(parents=True, exist_ok=True)
        path = scratch / "limit.json"
        path.write_text(json.dumps(spec | {"output": str(scratch / "out/limit.bin")}))
        return [sys.executable, "-m", "benchmarks.common.direct_loop", str(path), str(depth)]


def _joined(spans: list[Span]) -> list[Span]:
    """Join what lies side by side in a file."""
    joined: list[Span] = []
    for path, start, end in spans:
        if joined and (joined[-1][0], joined[-1][2]) == (path, start):
            joined[-1] = (path, joined[-1][1], end)
        else:
            joined.append((path, start, end))
    return joined


def best_depth(work: DiskWork, scratch: Path, seconds: Callable[[list[str]], float]) -> int:
    """Return the depth at which a sample of the work takes least, by a clock for commands."""
    sample = work.sample()
    return min(DEPTHS, key=lambda depth: seconds(sample.command(scratch, depth)))


@dataclass(frozen=True)
class DiskLimit:
    """Bytes of a run, and the depth at which direct I/O alone moves them fastest."""

    work: DiskWork
    depth: int
    scratch: Path

    @classmethod
    def of(cls, work: DiskWork, scratch: Path) -> DiskLimit:
        """Find the depth, in this run."""
        depth = best_depth(work, scratch, lambda command: fresh(command, scratch)().seconds)
        return cls(work, depth, scratch)

    def run(self) -> Measured:
        """Move the bytes."""
        return fresh(self.work.command(self.scratch, self.depth), self.scratch)()

    def facts(self) -> dict[str, int]:
        """Return what the result file says of it."""
        return {"bytes": self.work.size_bytes, "depth": self.depth}


@contextmanager
def layer_in_memory() -> Iterator[Path]:
    """Provide a checkpoint of V3's matrices with fewer experts, in memory."""
    from benchmarks.make_checkpoint import REAL_CONFIG, make_checkpoint

    config = REAL_CONFIG | {"n_routed_experts": _EXPERTS, "vocab_size": _VOCABULARY}
    config |= {"num_hidden_layers": 4}
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        yield make_checkpoint(
            folder,
            config,
            max_shard_bytes=4_300_000_000,
            filled=lambda name: name.startswith("model.layers.4.") or "layers" not in name,
            parted=False,
        )
    finally:
        shutil.rmtree(folder)


def kernel_rates(names: list[str]) -> dict[str, float]:
    """Measure the elements per second of conversions, by name, each in a process of its own."""
    if not names:
        return {}
    with layer_in_memory() as source:
        found = {}
        for name in names:
            command = [sys.executable, "-m", "benchmarks.common.limits", "rate", str(source), name]
            found[name] = float(json.loads(subprocess.check_output(command)))
        return found


def planned(name: str, source: Path) -> tuple[DiskWork, int]:
    """Return the work of a conversion and its elements. It is planned in a process of its own: a
    process's peak memory, as the kernel counts it, begins at its parent's."""
    command = [sys.executable, "-m", "benchmarks.common.limits", "work", str(source), name]
    facts = json.loads(subprocess.check_output(command))
    reads = tuple((path, start, end) for path, start, end in facts["reads"])
    return DiskWork(reads, facts["write_bytes"]), facts["elements"]


def plan_of(name: str, source: Path, output: Path) -> BundlePlan:
    """Plan a conversion: to xllm, int8 or int4."""
    from benchmarks.common.plans import SCHEMES, options
    from mtp_export.bundle.export import plan_export
    from mtp_export.bundle.options import BundleOptions
    from mtp_export.bundle.quantize import plan_quantize

    if name in SCHEMES:
        return plan_quantize(options(source, output, SCHEMES[name], group_size=128), dry_run=True)
    return plan_export(BundleOptions(source, output, target=name), dry_run=True)


def elements(plan: BundlePlan) -> int:
    """Weights that a run converts."""
    from mtp_export.plan import COPY

    sources = plan.checkpoint.tensors
    return sum(
        prod(sources[step.inputs[0]].shape) for step in plan.written_steps if step.operation != COPY
    )


def _rate(source: Path, name: str) -> float:
    """Convert a layer on every core and write nothing; return elements per second."""
    from mtp_checkpoints.sources.disk_queue import DiskQueue
    from mtp_checkpoints.tensors.tensor_stream import TensorStream
    from mtp_export.plan import Copy, Resources, Step
    from mtp_kernels.cpu.torch_threads import one_torch_thread

    plan = plan_of(name, source, source.with_name("none"))
    cores = len(os.sched_getaffinity(0))
    tensors, best = plan.checkpoint.tensors, 0.0
    with DiskQueue(cores) as queue, one_torch_thread(), ThreadPoolExecutor(cores) as pool:
        resources = Resources(1 << 30, "cpu")

        def convert(step: Step) -> None:
            assert not isinstance(step.operation, Copy)
            with ExitStack() as opened:
                inputs = [
                    opened.enter_context(TensorStream(tensors[name], queue)) for name in step.inputs
                ]
                step.operation.run(inputs, step.outputs, lambda number, data: None, resources)

        steps = [step for step in plan.written_steps if not isinstance(step.operation, Copy)]
        convert(steps[0])  # compiles
        for _ in range(_PASSES):
            start = time.perf_counter()
            list(pool.map(convert, steps))
            best = max(best, elements(plan) / (time.perf_counter() - start))
    return best


if __name__ == "__main__":
    _, action, folder, conversion = sys.argv
    if action == "rate":
        print(json.dumps(_rate(Path(folder), conversion)))
    else:
        plan = plan_of(conversion, Path(folder), Path(folder).with_name("none"))
        print(json.dumps(asdict(DiskWork.of(plan)) | {"elements": elements(plan)}))
