"""Compile the Triton kernel for devices that are not here, and report its resources.

    PYTHONPATH=kernels python -m benchmarks.compile_report_verify_attention [--capability 9.0] ...

Every launch of the tuning table for the installed Triton is compiled for a call with DeepSeek's
sizes; Triton's wheel brings ptxas and cuobjdump, so that neither a GPU nor a CUDA toolkit is
needed. Columns: registers and spilled bytes a thread, shared memory a program, and the number of
tensor-core instructions by kind.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

from benchmarks.common.compiled_resources import resources
from mtp_kernels.verify_attention.triton_choice import usual_sizes
from mtp_kernels.verify_attention.triton_compile import compile_attend
from mtp_kernels.verify_attention.triton_tuning import TABLES, Launch, listed, ordered

HEADS = (16, 128)


def configurations(capability: tuple[int, int]) -> list[tuple[str, Launch, int]]:
    """Return kind, launch and heads of everything the installed Triton's table can choose."""
    tables = listed(capability, triton.__version__)
    assert tables is not None, f"{capability} and Triton {triton.__version__} are in no table"
    return [
        (kind, launch, heads)
        for kind, launches in tables.items()
        for launch in launches
        for heads in HEADS
        if heads <= launch.rows or launch is launches[-1]
    ]


def compile_launch(
    capability: tuple[int, int], kind: str, launch: Launch, heads: int
) -> dict[str, Any]:
    """Compile one configuration; return its parameters and resources."""
    target = GPUTarget("cuda", capability[0] * 10 + capability[1], 32)
    kernel = compile_attend(target, usual_sizes(kind, heads), launch)
    row = {"capability": f"{capability[0]}.{capability[1]}", "kind": kind, "heads": heads}
    return row | asdict(launch) | resources(kernel)


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
        tile = TABLES[9, 0]["3.6"]["16 bit"][-1]
        rows = [compile_launch((9, 0), "16 bit", tile, 16)]
    else:
        names = options.capability or [f"{a}.{b}" for a, b in TABLES]
        capabilities = [ordered(name) for name in names]
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
