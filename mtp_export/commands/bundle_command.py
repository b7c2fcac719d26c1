"""Shared end of the commands that make a bundle, once their options are read: plan, run or make a
share, report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Group, RenderableType

from mtp_checkpoints.sources.byte_source import Place
from mtp_export.bundle.build import BundleResult, run_bundle
from mtp_export.bundle.bundle_plan import BundlePlan
from mtp_export.bundle.request import Request
from mtp_export.bundle.shares import jobs_of, run_share
from mtp_export.bundle.work import Maker, make_shards
from mtp_export.commands.bundle_tables import plan_facts, plan_table
from mtp_export.commands.garbage import few_collections
from mtp_export.commands.options import reporting_options
from mtp_export.commands.output import json_text, print_result, remark
from mtp_export.commands.report_files import try_reports
from mtp_export.commands.share_tables import (
    planned_facts,
    planned_line,
    share_facts,
    share_table,
)


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
    request: Request,
    others: Sequence[Place] = (),
) -> None:
    """Plan, run unless it is a dry run, and report; others are sources beside --input-dir."""
    reporting, dry_run = reporting_options(context), context.params["dry_run"]
    options = request.bundle
    places = (options.input_dir, *others, options.output_dir)
    folders = [place for place in places if isinstance(place, Path)]
    reports = try_reports({"--report": context.params["report"]}, folders)
    with few_collections():
        plan = request.plan(dry_run=dry_run)
    if dry_run:
        facts, table = plan_facts(plan), plan_table(plan)
        if options.run.share is not None:
            facts |= planned_facts(plan, options.run.share)
            table = Group(table, planned_line(plan, options.run.share))
    else:
        from mtp_export.commands.progress_bar import (
            progress_bar,
        )  # takes a fifth of a dry run's start

        total_bytes = sum(job.read_bytes for job in jobs_of(plan.jobs, options.run.share))
        with progress_bar(command.name, total_bytes, quiet=reporting.quiet) as progress:
            if options.run.share is None:
                make = _maker(request, context.params["cluster"])
                result = run_bundle(plan, progress, make)
                facts, table = command.facts(result), command.table(result)
            else:
                share = run_share(request, plan, progress)
                facts, table = share_facts(share), share_table(share)
    reports.write({"--report": lambda: json_text(facts)})
    print_result(facts, table, reporting)
    if not (reporting.quiet or reporting.as_json):
        for line in command.remarks(plan):
            remark(line)


def _maker(request: Request, cluster: str | None) -> Maker:
    """Return what makes the shards of a request: this process, or a cluster."""
    if cluster is None:
        return make_shards
    from mtp_export.cluster.shards import RayCluster

    return RayCluster(cluster, request)
