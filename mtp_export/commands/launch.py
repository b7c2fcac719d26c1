"""mtp-export launch: the command of an engine that serves a bundle, for each machine."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import Any

from mtp_checkpoints.errors import UnsupportedError, UsageError
from mtp_checkpoints.layouts import names_that_serve
from mtp_checkpoints.layouts.base import Placement
from mtp_export.bundle.launch import draft_lines, engines_of, node_lines, probe_of
from mtp_export.commands.output import Reporting, print_command, print_result
from mtp_export.commands.runtime import BUNDLE
from mtp_export.options import Access, Names, Panel, option, path_option
from mtp_export.paths import refuse_unprintable
from mtp_runtime.config import MAX_DRAFT_TOKENS


@dataclass(frozen=True)
class LaunchCommand:
    """Options of mtp-export launch."""

    bundle: Path = field(metadata=BUNDLE)
    engine: str | None = field(
        default=None,
        metadata=option(
            "One of {names}.",
            Panel.PLACEMENT,
            metavar="ENGINE",
            values=Names.ENGINE,
            show_default="all that read the bundle",
        ),
    )
    k: int | None = field(
        default=None,
        metadata=option(
            "Draft tokens per step.",
            Panel.SPECULATION,
            metavar="K",
            low=1,
            high=MAX_DRAFT_TOKENS,
            show_default="1, or what --report recommends",
        ),
    )
    report: Path | None = field(
        default=None,
        metadata=path_option(
            "Report of mtp-export verify, to take the k that it recommends for its largest batch.",
            Panel.SPECULATION,
            "FILE.json",
            access=Access.READ,
        ),
    )
    nodes: int = field(
        default=1, metadata=option("Number of machines.", Panel.PLACEMENT, metavar="N", low=1)
    )
    tp: int | None = field(
        default=None,
        metadata=option(
            "Devices of all machines together that share every layer.",
            Panel.PLACEMENT,
            metavar="N",
            low=1,
            show_default="the engine's",
        ),
    )
    head: str = field(
        default="127.0.0.1",
        metadata=option("Address of the first machine.", Panel.PLACEMENT, metavar="ADDRESS"),
    )
    run: bool = field(
        default=False,
        metadata=option(
            "Become the command of this machine, if the engine is installed.", Panel.PLACEMENT
        ),
    )
    node: int = field(
        default=0,
        metadata=option("This machine, from 0, for --run.", Panel.PLACEMENT, metavar="N", low=0),
    )
    reporting: Reporting = Reporting()


def launch(options: LaunchCommand) -> None:
    """Print, or run, the command that serves a bundle with an engine, or with each that reads it;
    print those of its extra drafts too."""
    bundle, nodes = options.bundle, options.nodes
    refuse_unprintable(bundle)
    if options.tp is None and nodes > 1:
        raise UsageError("Several machines need --tp", expected="the devices of all of them")
    if options.node >= nodes:
        raise UsageError(
            "There is no such machine", expected=f"--node below {nodes}", found=options.node
        )
    draft_tokens, placement = _draft_tokens(options), None
    if options.tp is not None:
        placement = Placement(options.tp, nodes, head=quote(options.head))
    names = [options.engine] if options.engine else _engines(bundle, only=options.run)
    engines = [
        _Engine(
            name,
            list(node_lines(bundle, name, placement, draft_tokens)),
            draft_lines(bundle, name, placement, draft_tokens),
        )
        for name in names
    ]
    if options.run:
        (only,) = engines
        _become(only.commands[options.node], only.name, probe_of(bundle, only.name))
    if options.reporting.as_json:
        facts = {each.name: each.as_json() for each in engines}
        (name, one), *others = facts.items()
        shown = {"engines": facts} if others else {"engine": name, **one}
        print_result(shown | {"draft_tokens": draft_tokens}, "", options.reporting)
        return
    for each in engines:
        each.show(each.name if len(engines) > 1 else "")


@dataclass(frozen=True)
class _Engine:
    """An engine and its commands, one for each machine: those of the bundle's MTP module, and those
    of its extra drafts by method, None where the engine has none."""

    name: str
    commands: list[str]
    draft_commands: dict[str, list[str] | None]

    def as_json(self) -> dict[str, Any]:
        return {"commands": self.commands, "draft_commands": self.draft_commands}

    def show(self, shown_name: str) -> None:
        """Print the commands, under the name that tells the engine from others."""
        _show(self.commands, shown_name, "draft mtp" if self.draft_commands else "")
        for method, own in self.draft_commands.items():
            draft = f"draft {method}"
            if own is None:
                what = ", ".join(filter(None, [shown_name, draft]))
                print(f"# {what}: {self.name} has no command for it; mtp-export serve runs it")
            else:
                _show(own, shown_name, draft)


def _engines(bundle: Path, *, only: bool) -> list[str]:
    """Return the engines that serve a bundle (UsageError where there is none, and for several where
    it must be one)."""
    engines = engines_of(bundle)
    if len(engines) == 1 or (engines and not only):
        return engines
    raise UsageError(
        "Several engines serve this bundle" if engines else "No known engine serves this bundle",
        where=bundle,
        expected=f"--engine {' or --engine '.join(engines or names_that_serve())}",
        found="no --engine",
    )


def _draft_tokens(options: LaunchCommand) -> int:
    """Return the drafts per step that are asked for, or that a report recommends (UsageError where
    it recommends none)."""
    if options.k is not None or options.report is None:
        return options.k or 1
    from mtp_export.verify.report.reading import read_report

    k = read_report(options.report).recommended_k
    if k is None:
        raise UsageError(
            "The report recommends no number of drafts",
            where=options.report,
            expected="one of a verification whose check speed was run and gained",
            todo="Choose one by --k",
        )
    return k


def _show(lines: Sequence[str], *names: str) -> None:
    """Print the command of each machine, under what tells it from others."""
    for number, line in enumerate(lines):
        machine = f"machine {number}" if len(lines) > 1 else ""
        if heading := ", ".join(filter(None, [*names, machine])):
            print(f"# {heading}")
        print_command(line)


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
