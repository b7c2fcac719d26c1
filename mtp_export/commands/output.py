"""Where results and remarks go: tables or JSON on stdout, everything else on stderr."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console

from mtp_export.bundle.build import BundleOptions
from mtp_export.checkpoint.files import write_json
from mtp_export.commands.tables import Table
from mtp_export.errors import UsageError


def check_report(report: Path | None, options: BundleOptions) -> None:
    """Refuse a report that would fall into a checkpoint or has nowhere to go (UsageError)."""
    check_place("--report", report, options.input_dir, options.output_dir)


def check_place(option: str, path: Path | None, *folders: Path) -> None:
    """Refuse a file to be written inside one of the folders, or in none that exists
    (UsageError)."""
    if path is None:
        return
    place = path.resolve()
    inside = any(folder.resolve() in place.parents for folder in folders)
    if not place.parent.is_dir() or inside:
        raise UsageError(
            "The report cannot be written there",
            where=path,
            expected="a file in an existing folder outside the input and the output",
            todo=f"Choose another place for {option}",
        )


def say(
    facts: dict[str, Any], table: Table, report: Path | None, as_json: bool, quiet: bool
) -> None:
    """A result: into a file if asked, and as JSON or as a table for people, below it the commands
    that serve it (unwrapped, to be copied)."""
    if report is not None:
        write_json(report, facts)
    if as_json:
        print(json.dumps(facts, indent=2, ensure_ascii=False))
    elif not quiet:
        Console(markup=False).print(table)
        for engine, line in facts.get("launch", {}).items():
            print(f"\nTo serve it with {engine}:\n{line}")


def remark(text: str) -> None:
    """A line on stderr."""
    stderr().print(text, highlight=False)


def stderr() -> Console:
    return Console(stderr=True, markup=False)
