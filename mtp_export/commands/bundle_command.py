"""Shared end of the commands that make a bundle, once their options are read: plan, run, report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import RenderableType

from mtp_export.bundle.build import BundlePlan, BundleResult, run_bundle
from mtp_export.bundle.options import BundleOptions
from mtp_export.commands.bundle_tables import plan_facts, plan_table
from mtp_export.commands.garbage import few_collections
from mtp_export.commands.options import reporting_options
from mtp_export.commands.output import json_text, print_result, remark
from mtp_export.commands.report_files import try_reports


@dataclass(frozen=True)
class BundleCommand:
    """A command that makes a bundle.

    name titles its progress; facts and table are the two forms of its result; remarks are lines for
    people on stderr.
    """

    name: str
    facts: Callable[[BundleResult], dict[str, Any]]
    table: Callable[[BundleResult], RenderableType]
    remarks: Callable[[BundlePlan], list[str]]


def make_bundle(
    command: BundleCommand,
    context: typer.Context,
    options: BundleOptions,
    plan_for: Callable[[bool], BundlePlan],
) -> None:
    """Plan, run unless it is a dry run, and report.

    plan_for takes whether this is a dry run: such a plan touches nothing.
    """
    reporting, dry_run = reporting_options(context), context.params["dry_run"]
    folders = [p for p in (options.input_dir, options.output_dir) if isinstance(p, Path)]
    reports = try_reports({"--report": context.params["report"]}, folders)
    with few_collections():
        plan = plan_for(dry_run)
    if dry_run:
        facts, table = plan_facts(plan), plan_table(plan)
    else:
        from mtp_export.commands.progress_bar import (
            progress_bar,
        )  # takes a fifth of a dry run's start

        total_bytes = plan.written_bytes + plan.checked_bytes
        with progress_bar(command.name, total_bytes, quiet=reporting.quiet) as progress:
            result = run_bundle(plan, progress)
        facts, table = command.facts(result), command.table(result)
    reports.write({"--report": lambda: json_text(facts)})
    print_result(facts, table, reporting)
    if not (reporting.quiet or reporting.as_json):
        for line in command.remarks(plan):
            remark(line)
