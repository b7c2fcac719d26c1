"""Output of the commands: tables or JSON on stdout, everything else on stderr."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType

from mtp_export.checkpoint.files import write_json
from mtp_export.errors import UsageError


@dataclass(frozen=True)
class Reporting:
    """Places where a command reports its result: a JSON file, and JSON or a table on stdout."""

    report: Path | None = None
    as_json: bool = False
    quiet: bool = False


def check_report_path(option: str, path: Path | None, folders: Sequence[Path]) -> None:
    """Refuse a report inside one of the folders or in a missing one (UsageError)."""
    if path is None:
        return
    resolved = path.resolve()
    inside = any(folder.resolve() in resolved.parents for folder in folders)
    if not resolved.parent.is_dir() or inside:
        raise UsageError(
            "The report cannot be written there",
            where=path,
            expected="a file in an existing folder outside the input and the output",
            todo=f"Choose another path for {option}",
        )


def print_result(facts: dict[str, Any], table: RenderableType, reporting: Reporting) -> None:
    """Report a result: to a file if asked, and to stdout as JSON or as a table.

    The commands that serve a bundle follow the table, unwrapped so that they can be copied.
    """
    if reporting.report is not None:
        write_json(reporting.report, facts)
    if reporting.as_json:
        print(json.dumps(facts, indent=2, ensure_ascii=False))
    elif not reporting.quiet:
        Console(markup=False).print(table)
        for engine, line in facts.get("launch", {}).items():
            print(f"\nTo serve it with {engine}:\n{line}")


def remark(text: str) -> None:
    """Print a line on stderr."""
    Console(stderr=True, markup=False).print(text, highlight=False)
