"""mtp-export finish: make a bundle whole of which all shares are made."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from mtp_export.bundle.shares import finish_shares, shared_request
from mtp_export.commands import options as shared
from mtp_export.commands.bundle_command import BundleCommand
from mtp_export.commands.garbage import few_collections
from mtp_export.commands.output import json_text, print_result
from mtp_export.commands.report_files import try_reports

OutputDir = Annotated[
    Path,
    typer.Argument(
        parser=shared.parse_path, metavar="OUT", help="Output folder of the runs with --share."
    ),
]


def finish(
    context: typer.Context,
    output_dir: OutputDir,
    report: shared.Report = None,
    as_json: shared.AsJson = False,
    quiet: shared.Quiet = False,
    debug: shared.Debug = False,
) -> None:
    """Finish a bundle that was made in shares: check that all are there, write configs and
    manifest."""
    request = shared_request(output_dir)
    reports = try_reports({"--report": report}, [output_dir])
    command: BundleCommand = import_module(f"mtp_export.commands.{request.planner}").COMMAND
    with few_collections():
        plan = request.plan()
    result = finish_shares(plan)
    facts = command.facts(result)
    reports.write({"--report": lambda: json_text(facts)})
    print_result(facts, command.table(result), shared.reporting_options(context))
