"""Launch parameters of verify_attention for a device: candidates are compiled, those that fit are
timed, and the fastest of each size make its table.

Each target is a call whose rows (n x h) meet the tiles as they are chosen: up to 16, 32 and 64
rows by a tile of that size or several smaller ones, longer groups by the table's last tile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.errors import TritonError

from benchmarks.common.attention_shapes import Shape, cache_count, pools_of
from benchmarks.gpu_report.device import Device
from benchmarks.gpu_report.stages import Row
from mtp_kernels.gpu.devices import Gpu
from mtp_kernels.verify_attention import triton_cuda
from mtp_kernels.verify_attention.inputs import Inputs, Sizes
from mtp_kernels.verify_attention.triton_choice import launch_for, usual_sizes
from mtp_kernels.verify_attention.triton_compile import compile_attend
from mtp_kernels.verify_attention.triton_tuning import Launch, product_kind

MAX_APART = 0.01  # of two launches' results, relative


@dataclass(frozen=True)
class Target:
    """A call that a tile is chosen by. rows: the largest tile that it may get; last: it stands
    for all longer groups."""

    shape: Shape
    rows: int
    last: bool = False


def candidates() -> list[Launch]:
    """Return every launch that might fit some device."""
    sizes = product((16, 32, 64), (16, 32, 64, 128), (4, 8), (1, 2, 3, 4), (1, 2))
    return [Launch(*size) for size in sizes]


def compiled_bytes(target: GPUTarget, heads: int, launch: Launch, dtype: torch.dtype) -> int | None:
    """Return shared memory of a program, None where the launch does not compile.

    What is compiled here, in a process of its own, the launch later finds in Triton's cache.
    """
    sizes = replace(usual_sizes("16 bit", heads), dtype=dtype, kv_dtype=dtype)
    try:
        return int(compile_attend(target, sizes, launch).metadata.shared)
    except Exception as error:  # whatever a compiler's pass raises: this one is left out
        print(f"  {launch}: {error!r}", flush=True)
        return None


@dataclass
class Tuner:
    """Times candidates for each target, the present table's choice first, then each when it is
    compiled: one whose compilation takes long holds up no other."""

    device: Device
    targets: Sequence[Target]
    dtype: torch.dtype
    executor: Executor
    launches: Sequence[Launch]
    _wanted: dict[Target, torch.Tensor] = field(default_factory=dict)

    def rows(self) -> Iterator[Row]:
        """Yield a row per target and candidate."""
        waiting = self._compiled()
        for target in self.targets:
            yield self._row(target, self._present(target))
        while waiting:
            ready = wait(waiting, return_when=FIRST_COMPLETED).done
            for future in [one for one in waiting if one in ready]:
                for target, launch in waiting.pop(future):
                    if fits(launch, self.device.gpu, future.result()):
                        yield self._row(target, launch)

    def _compiled(self) -> dict[Future[int | None], list[tuple[Target, Launch]]]:
        """Compile candidates side by side, the largest blocks first; programs per processor do not
        change what is compiled."""
        users: dict[tuple[int, Launch], list[tuple[Target, Launch]]] = {}
        for launch in sorted(self.launches, key=lambda one: -one.tokens * one.stages):
            for target in self.targets:
                if launch.rows <= target.rows and launch != self._present(target):
                    job = target.shape.heads, replace(launch, programs_per_sm=1)
                    users.setdefault(job, []).append((target, launch))
        gpu = self.device.gpu
        return {
            self.executor.submit(compiled_bytes, gpu.target, *job, self.dtype): own
            for job, own in users.items()
        }

    def _present(self, target: Target) -> Launch:
        rows = target.shape.queries * target.shape.heads
        launch = launch_for(self.device.gpu, dtype=self.dtype, kv_dtype=self.dtype, rows=rows)
        return replace(launch, rows=min(launch.rows, target.rows))

    def _row(self, target: Target, launch: Launch) -> Row:
        row = asdict(target.shape) | {"target_rows": target.rows, "last": target.last}
        row |= {"launch": asdict(launch)}
        try:
            calls = launched(self.device, target.shape, self.dtype, launch)
            out = calls[0]().float()
            wanted = self._wanted.setdefault(target, out)
            apart = float((out - wanted).norm() / wanted.norm())
            if not apart <= MAX_APART:
                return row | {"us": None, "error": f"its result is {apart} apart from the first's"}
            return row | {"us": self.device.seconds(calls) * 1e6}
        except (RuntimeError, TritonError) as error:  # more registers or memory than there are
            return row | {"us": None, "error": str(error)}


def fits(launch: Launch, gpu: Gpu, shared_bytes: int | None) -> bool:
    """Return True where the programs of a launch that compiles fit side by side."""
    return shared_bytes is not None and shared_bytes * launch.programs_per_sm <= gpu.shared_bytes


def launched(
    device: Device, shape: Shape, dtype: torch.dtype, launch: Launch
) -> list[Callable[[], torch.Tensor]]:
    """Return calls of a shape by one launch, each to another cache, which give their outputs: of
    equal shapes the same."""
    torch.manual_seed(0)
    pools = pools_of(shape, device.device, dtype, cache_count(shape))
    first = pools[0]
    sizes = Sizes(
        batch=shape.batch,
        queries=len(first["q_latent"]),
        max_q_len=shape.queries,
        kv_tokens=first["page_table"].shape[1] * first["kv_cache"].shape[1],
        heads=shape.heads,
        latent=first["q_latent"].shape[2],
        rope=first["q_rope"].shape[2],
        page=first["kv_cache"].shape[1],
        dtype=dtype,
        kv_dtype=dtype,
    )
    schedule = triton_cuda.schedule_of(sizes, launch, device.gpu.processors, None)
    size_bytes = triton_cuda.scheduled_bytes(sizes, schedule)
    buffer = torch.empty(size_bytes, dtype=torch.uint8, device=device.device)
    out = torch.empty_like(first["q_latent"])
    lse = out.new_empty(out.shape[:2], dtype=torch.float32)

    def call_of(pool: dict[str, Any]) -> Callable[[], torch.Tensor]:
        inputs = Inputs(**pool, max_q_len=sizes.max_q_len)

        def call() -> torch.Tensor:
            triton_cuda.run(inputs, schedule, buffer, out, lse)
            return out

        return call

    return [call_of(pool) for pool in pools]


def tables_of(
    rows: Sequence[Row], targets: Sequence[Target], dtype: torch.dtype
) -> dict[str, list[dict[str, int]]]:
    """Return the table by kind of product: the fastest tile of each target that was timed.

    A target whose fastest tile is smaller than its rows gets none of its own.
    """
    table: list[Launch] = []
    for target in sorted(targets, key=lambda target: (target.last, target.rows)):
        best = best_for(rows, target)
        if best is None or best in table[-1:]:
            continue
        if target.last or best.rows == target.rows:
            table.append(best)
    return {product_kind(dtype, dtype): [asdict(launch) for launch in table]} if table else {}


def best_for(rows: Iterable[Row], target: Target) -> Launch | None:
    """Return the fastest launch that was timed for a target, if any was."""
    mine = [
        row
        for row in rows
        if (row["target_rows"], row["last"]) == (target.rows, target.last)
        if row["us"] is not None
    ]
    return Launch(**min(mine, key=lambda row: float(row["us"]))["launch"]) if mine else None
