"""What export and quantize have in common once their options are read: plan, run, say what came
of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtp_export.bundle.build import BundleOptions, BundlePlan, BundleResult, run_bundle
from mtp_export.commands import tables
from mtp_export.commands.output import check_report, remark, say, stderr
from mtp_export.commands.tables import Table
from mtp_export.progress import shown


@dataclass(frozen=True)
class Saying:
    """Whether a command only plans, and how it says what it planned or did."""

    dry_run: bool
    report: Path | None
    as_json: bool
    quiet: bool


@dataclass(frozen=True)
class Command:
    """A command that makes a bundle: its name for the progress, and how it tells its result, as
    facts and as a table; remarks are lines for people beside it."""

    name: str
    facts: Callable[[BundleResult], dict[str, Any]]
    table: Callable[[BundleResult], Table]
    remarks: Callable[[BundlePlan], list[str]]


def carry_out(
    command: Command,
    plan_it: Callable[[bool], BundlePlan],
    options: BundleOptions,
    saying: Saying,
) -> None:
    """Plan (told whether it is a dry run), run unless it is one, and say it."""
    check_report(saying.report, options)
    plan = plan_it(saying.dry_run)
    if saying.dry_run:
        facts, table = tables.plan_facts(plan), tables.plan_table(plan)
    else:
        total_bytes = plan.written_bytes + plan.checked_bytes
        with shown(stderr(), command.name, total_bytes, saying.quiet) as progress:
            result = run_bundle(plan, progress)
        facts, table = command.facts(result), command.table(result)
    say(facts, table, saying.report, saying.as_json, saying.quiet)
    if not (saying.quiet or saying.as_json):
        for line in command.remarks(plan):
            remark(line)
