"""A GPU's architecture and limits, which launch parameters are chosen by."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver


@dataclass(frozen=True)
class Gpu:
    """A GPU, or one that the interpreter plays.

    target is Triton's: backend "cuda" or "hip", architecture (90, or "gfx942") and threads of a
    warp. shared_bytes: most shared memory of one program.
    """

    name: str
    target: GPUTarget
    processors: int
    shared_bytes: int
    triton: str

    @property
    def capability(self) -> tuple[int, int] | None:
        """Compute capability, None for GPUs that are not NVIDIA's."""
        arch = self.target.arch
        return divmod(arch, 10) if isinstance(arch, int) else None

    def __str__(self) -> str:
        architecture = (
            self.target.arch if self.capability is None else "{}.{}".format(*self.capability)
        )
        return f"{self.name} (architecture {architecture}, Triton {self.triton})"


# The interpreter plays a device whose table has all three tiles of verify_attention. It runs
# programs one after another, on the CPU.
INTERPRETED = Gpu("Triton's interpreter", GPUTarget("cuda", 90, 32), 4, 232_448, "3.6")


def gpu_of(device: torch.device) -> Gpu:
    """Return the GPU of a CUDA or ROCm device; for the CPU the one that the interpreter plays."""
    if device.type == "cpu":
        return INTERPRETED
    return _gpu(torch.cuda.current_device() if device.index is None else device.index)


def launches_on(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current one while its kernels are launched: Triton knows no other."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@cache
def _gpu(index: int) -> Gpu:
    with torch.cuda.device(index):
        target = driver.active.get_current_target()
        limits = driver.active.utils.get_device_properties(index)
    return Gpu(
        name=torch.cuda.get_device_name(index),
        target=target,
        processors=limits["multiprocessor_count"],
        shared_bytes=limits["max_shared_mem"],
        triton=triton.__version__,
    )
