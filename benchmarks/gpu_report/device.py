"""The device that is measured, and how calls on it are timed."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import triton

from mtp_kernels.gpu.devices import Gpu, gpu_of

Call = Callable[[], object]
WARM_CALLS = 2


class Device(Protocol):
    """A device, and its clock."""

    @property
    def device(self) -> torch.device: ...

    @property
    def gpu(self) -> Gpu: ...

    @property
    def free_bytes(self) -> int: ...

    def seconds(self, calls: Sequence[Call], *, captured: bool = True) -> float:
        """Return median seconds of one of the calls, which follow each other on the device.

        captured: in a graph, so that the host's time does not count; not for calls that wait.
        """

    def forget(self) -> None:
        """Give freed memory back."""


@dataclass(frozen=True)
class CudaDevice:
    """A CUDA or ROCm device, timed by its own events. cuda: torch.cuda."""

    cuda: Any = torch.cuda
    replays: int = 20

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.cuda.current_device())

    @property
    def gpu(self) -> Gpu:
        return gpu_of(self.device)

    @property
    def free_bytes(self) -> int:
        return int(self.cuda.mem_get_info()[0])

    def seconds(self, calls: Sequence[Call], *, captured: bool = True) -> float:
        """Return the median over replays of a graph of the calls, or over rounds of them."""
        for call in list(calls) * WARM_CALLS:
            call()
        self.cuda.synchronize()
        if not captured:
            return self._median(lambda: [call() for call in calls]) / len(calls)
        graph = self.cuda.CUDAGraph()
        with self.cuda.graph(graph):
            for call in calls:
                call()
        graph.replay()
        return self._median(graph.replay) / len(calls)

    def forget(self) -> None:
        self.cuda.empty_cache()

    def _median(self, run: Call) -> float:
        seconds = []
        for _ in range(self.replays):
            start, end = (self.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            seconds.append(start.elapsed_time(end) / 1e3)
        return statistics.median(seconds)


def facts_of(device: Device) -> dict[str, Any]:
    """Return the hardware and versions that figures belong to."""
    gpu = device.gpu
    return {
        "gpu": gpu.name,
        "architecture": gpu.target.arch,
        "processors": gpu.processors,
        "shared_bytes": gpu.shared_bytes,
        "free_bytes": device.free_bytes,
        "driver": driver(),
        "cores": len(os.sched_getaffinity(0)),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
        },
    }


def driver() -> str | None:
    """Return the driver's version and the GPUs' highest clocks and power, None where it tells
    nothing."""
    names = "driver_version,clocks.max.sm,clocks.max.mem,power.limit,memory.total"
    command = ["nvidia-smi", f"--query-gpu={names}", "--format=csv"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
