"""Run as a script: compiles kernels for a GPU that is not here, then asks Triton for what launches
would need there.

    python compiled_beforehand.py CACHE     prints kernels in the cache after either, as JSON
"""

from __future__ import annotations

import json
import math
import os
import sys
import warnings
from pathlib import Path

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from mtp_kernels.gpu.devices import INTERPRETED
from mtp_kernels.verify_attention.triton_choice import usual_sizes
from mtp_kernels.verify_attention.triton_compile import attend_constants, compile_attend
from mtp_kernels.verify_attention.triton_kernels import attend_kernel
from mtp_kernels.verify_attention.triton_tuning import Launch

LAUNCH = Launch(16, 16, 4, 1, 1)


class Driver:
    """Triton's driver of a GPU."""

    def get_current_target(self) -> GPUTarget:
        return INTERPRETED.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def attention(kind: str) -> None:
    """Arguments of run in verify_attention/triton_cuda.py."""
    sizes = usual_sizes(kind)

    def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    def counts(*shape: int) -> torch.Tensor:
        return zeros(*shape, dtype=torch.int32)

    queries = [zeros(4, 16, width, dtype=sizes.dtype) for width in (512, 64, 512)]
    cache = zeros(2, 64, 576, dtype=sizes.kv_dtype)
    attend_kernel.run(
        *queries[:2], cache, zeros(2, 64) if kind == "fp8" else None, counts(8, 128), counts(8),
        counts(9), math.log2(math.e), counts(9), counts(8), counts(1), queries[2], zeros(4, 16),
        zeros(8, 64, 512), zeros(8, 64), 128, 64, **attend_constants(sizes, LAUNCH),
        num_warps=LAUNCH.warps, grid=(1,), warmup=True,
    )  # fmt: skip


def found_by_launches(cache: Path) -> dict[str, list[int]]:
    """Count the kernels in the cache after each was compiled, and after its launch."""
    counts: dict[str, list[int]] = {}
    for kind in ("16 bit", "fp8", "fp32"):
        compile_attend(INTERPRETED.target, usual_sizes(kind), LAUNCH)
        counts[kind] = [len(list(cache.iterdir()))]
        attention(kind)
        counts[kind].append(len(list(cache.iterdir())))
    return counts


def main(cache: Path) -> None:
    os.environ["TRITON_CACHE_DIR"] = str(cache)
    driver.set_active(Driver())
    print(json.dumps(found_by_launches(cache)))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]))
