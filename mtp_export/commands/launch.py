"""mtp-export launch: the command of an engine that serves a bundle, for each machine."""

from __future__ import annotations

import os
import subprocess
from shlex import quote
from typing import Annotated

import typer

from mtp_checkpoints.errors import UnsupportedError, UsageError
from mtp_checkpoints.layouts import names_that_serve
from mtp_checkpoints.layouts.base import Placement
from mtp_export.bundle.launch import node_lines, probe_of
from mtp_export.commands import options as shared
from mtp_export.commands import runtime
from mtp_export.commands.output import Reporting, print_result

PLACEMENT = "Machines and devices"

EngineName = Annotated[
    str,
    typer.Option(
        "--engine",
        metavar="NAME",
        help=f"One of {', '.join(names_that_serve())}.",
        rich_help_panel=PLACEMENT,
    ),
]
Nodes = Annotated[
    int, typer.Option(min=1, metavar="N", rich_help_panel=PLACEMENT, help="Number of machines.")
]
Tp = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        rich_help_panel=PLACEMENT,
        help="Devices of all machines together that share every layer.",
        show_default="the engine's",
    ),
]
Head = Annotated[
    str,
    typer.Option(
        metavar="ADDRESS", rich_help_panel=PLACEMENT, help="Address of the first machine."
    ),
]
Run = Annotated[
    bool,
    typer.Option(
        "--run",
        rich_help_panel=PLACEMENT,
        help="Become this machine's command, if the engine is installed.",
    ),
]
Node = Annotated[
    int,
    typer.Option(
        min=0, metavar="N", rich_help_panel=PLACEMENT, help="This machine, from 0, for --run."
    ),
]


def launch(
    bundle: runtime.Bundle,
    engine: EngineName,
    nodes: Nodes = 1,
    tp: Tp = None,
    head: Head = "127.0.0.1",
    run: Run = False,
    node: Node = 0,
    as_json: shared.AsJson = False,
) -> None:
    """Print, or run, the command that serves a bundle with an engine."""
    if tp is None and nodes > 1:
        raise UsageError("Several machines need --tp", expected="the devices of all of them")
    if node >= nodes:
        raise UsageError("There is no such machine", expected=f"--node below {nodes}", found=node)
    placement = None if tp is None else Placement(tp, nodes, head=quote(head))
    lines = list(node_lines(bundle, engine, placement))
    if run:
        _become(lines[node], engine, probe_of(bundle, engine))
    if as_json:
        print_result({"engine": engine, "commands": lines}, "", Reporting(as_json=True))
        return
    for number, line in enumerate(lines):
        if len(lines) > 1:
            print(f"# machine {number}")
        print(line)


def _become(line: str, engine: str, probe: str) -> None:
    """Run a command in this process's place (UnsupportedError where the engine is missing)."""
    found = subprocess.run(["bash", "-c", probe], capture_output=True, check=False)
    if found.returncode:
        raise UnsupportedError(
            f"{engine} is not installed here",
            expected=f"success of: {probe}",
            todo="Install it, or run the printed command where it is",
        )
    script = f"{line}\ncode=$?\nwait\nexit $code"  # xLLM's processes are in the background
    os.execvp("bash", ["bash", "-c", script])
