"""Compile the Triton kernel for devices that are not here, and report its resources.

    PYTHONPATH=kernels python benchmarks/compile_report_verify_attention.py [--capability 9.0] ...

Every launch of the tuning table for the installed Triton is compiled for a call with DeepSeek's
sizes; Triton's wheel brings ptxas and cuobjdump, so that neither a GPU nor a CUDA toolkit is
needed. Columns: registers and spilled bytes a thread, shared memory a program, and the number of
tensor-core instructions by kind.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mtp_kernels.verify_attention import triton_cuda, triton_kernels, triton_tuning
from mtp_kernels.verify_attention.inputs import Sizes

# The names Triton gives dtypes in a signature.
TYPE_NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.float8_e4m3fn: "fp8e4nv"}
KINDS = {
    "16 bit": (torch.bfloat16, torch.bfloat16),
    "fp8": (torch.bfloat16, torch.float8_e4m3fn),
    "fp32": (torch.float32, torch.float32),
}
INSTRUCTIONS = {"wgmma": "wgmma.mma_async", "mma": "mma.sync", "tcgen05": "tcgen05.mma"}
HEADS = (16, 128)


def configurations(capability: tuple[int, int]) -> list[tuple[str, triton_tuning.Launch, int]]:
    """Return kind, launch and heads of everything the installed Triton's table can choose."""
    tables = triton_tuning.tables_for(capability, triton.__version__)
    return [
        (kind, launch, heads)
        for kind, launches in tables.items()
        for launch in launches
        for heads in HEADS
        if heads <= launch.rows or launch is launches[-1]
    ]


def signature(sizes: Sizes) -> dict[str, str]:
    """Return the types of the kernel's run-time arguments."""
    queries, cache = TYPE_NAMES[sizes.dtype], TYPE_NAMES[sizes.kv_dtype]
    types = dict.fromkeys(triton_kernels.attend_kernel.arg_names, "constexpr")
    types |= dict.fromkeys(("q_latent", "q_rope", "out"), f"*{queries}")
    types |= dict.fromkeys(("lse", "part_out", "part_lse"), "*fp32")
    types |= dict.fromkeys(("page_table", "kv_lens", "cu_q", "starts"), "*i32")
    types |= dict.fromkeys(("part_requests", "share_in"), "*i32")
    types |= {"kv_cache": f"*{cache}", "scale_log2": "fp32", "max_pages": "i32", "max_rows": "i32"}
    if sizes.kv_dtype == torch.float8_e4m3fn:
        types["kv_scale"] = "*fp32"
    return types


def compile_launch(
    capability: tuple[int, int], kind: str, launch: triton_tuning.Launch, heads: int
) -> dict[str, Any]:
    """Compile one configuration; return its parameters and resources."""
    dtype, kv_dtype = KINDS[kind]
    sizes = Sizes(8, 32, 4, 8192, heads, 512, 64, 64, dtype, kv_dtype)
    schedule = triton_cuda.Schedule(launch, launch.tokens, 1, 132, launch.min_share)
    types = signature(sizes)
    names = list(types)
    constants: dict[str, Any] = dict(triton_cuda.attend_constants(sizes, schedule))
    if types["kv_scale"] == "constexpr":
        constants["kv_scale"] = None
    aligned = [name for name in names if types[name].startswith("*")] + ["max_rows"]
    source = ASTSource(
        triton_kernels.attend_kernel,
        types,
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    target = GPUTarget("cuda", capability[0] * 10 + capability[1], 32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Triton 3.9 announces a default of 3.10
        kernel = triton.compile(source, target=target, options={"num_warps": launch.warps})
    row = {"capability": f"{capability[0]}.{capability[1]}", "kind": kind, "heads": heads}
    return row | asdict(launch) | resources(kernel)


def resources(kernel: Any) -> dict[str, int]:
    """Return registers and spills of the machine code, instructions of the assembly."""
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


def markdown(rows: list[dict[str, Any]]) -> str:
    names = [name for name in rows[0] if name != "min_share"]
    lines = [f"Triton {triton.__version__}.", "", f"| {' | '.join(names)} |"]
    lines.append(f"|{'---|' * len(names)}")
    lines += [f"| {' | '.join(str(row[name]) for name in names)} |" for row in rows]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--capability", action="append", help="for instance 9.0; default: all")
    parser.add_argument("--rows-64", action="store_true", help="the 64-row tile of 9.0 alone")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    if options.rows_64:
        tile = triton_tuning.TABLES[9, 0]["3.6"]["16 bit"][-1]
        rows = [compile_launch((9, 0), "16 bit", tile, 16)]
    else:
        names = options.capability or [f"{a}.{b}" for a, b in triton_tuning.TABLES]
        capabilities = [triton_tuning.ordered(name) for name in names]
        rows = [
            compile_launch(capability, *configuration)
            for capability in capabilities
            for configuration in configurations(capability)
        ]
    report = {"triton": triton.__version__, "rows": rows}
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    if options.markdown:
        options.markdown.write_text(markdown(rows))
    print(markdown(rows))


if __name__ == "__main__":
    main()
