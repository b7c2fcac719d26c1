"""Resources of compiled Triton kernels: what the machine code takes, and its tensor instructions.

Triton's wheel brings cuobjdump, so that neither a GPU nor a CUDA toolkit is needed.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton

INSTRUCTIONS = {"wgmma": "wgmma.mma_async", "mma": "mma.sync", "tcgen05": "tcgen05.mma"}


def resources(kernel: Any) -> dict[str, int]:
    """Return registers and spills per thread, shared memory per program, and instructions."""
    cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(cuobjdump), "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    counts = {name: kernel.asm["ptx"].count(text) for name, text in INSTRUCTIONS.items()}
    return {
        "registers": found["REG"],
        "spilled_bytes": found["STACK"] + found["LOCAL"],
        "shared_bytes": kernel.metadata.shared,
    } | counts
