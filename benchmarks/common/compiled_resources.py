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
    usage = _cuobjdump(kernel, "-res-usage")
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    counts = {name: kernel.asm["ptx"].count(text) for name, text in INSTRUCTIONS.items()}
    return {
        "registers": found["REG"],
        "spilled_bytes": found["STACK"] + found["LOCAL"],
        "shared_bytes": kernel.metadata.shared,
    } | counts


def inner_loop(kernel: Any) -> list[str]:
    """Return the machine instructions, operands included, of the shortest loop with a product of
    tensor cores."""
    pattern = r"^ +/\*([0-9a-f]{4,})\*/ +(.*?) *;"
    code = re.findall(pattern, _cuobjdump(kernel, "-sass"), re.MULTILINE)
    lines = [(int(address, 16), text) for address, text in code]
    loops = []
    for end, text in lines:
        jump = re.search(r"BRA.* 0x([0-9a-f]+)", text)
        if jump and int(jump[1], 16) < end:
            body = [line for address, line in lines if int(jump[1], 16) <= address <= end]
            if any("MMA." in line for line in body):
                loops.append(body)
    return min(loops, key=len)


def _cuobjdump(kernel: Any, option: str) -> str:
    cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(cuobjdump), option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
