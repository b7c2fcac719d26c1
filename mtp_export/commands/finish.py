"""mtp-export finish: make a bundle whole of which all shares are made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType

from mtp_checkpoints.errors import UsageError
from mtp_export.bundle.build import BundleResult
from mtp_export.bundle.shares import finish_shares, shared_plan, shared_request
from mtp_export.commands import bundle_tables, export, graft, quantize
from mtp_export.commands.garbage import gc_paused
from mtp_export.commands.output import REPORT, QuietReporting, json_text, print_result
from mtp_export.commands.pairing import Proving, with_pairing
from mtp_export.commands.report_files import try_reports
from mtp_export.options import Access, argument, parse_path
from mtp_export.paths import refuse_overlaps, refuse_unprintable

# The two forms of a result, by the planner that it is of.
_FORMS: dict[
    str, tuple[Callable[[BundleResult], dict[str, Any]], Callable[[BundleResult], RenderableType]]
] = {
    "export": (bundle_tables.result_facts, export.result_table),
    "graft": (bundle_tables.result_facts, graft.result_table),
    "quantize": (quantize.result_facts, quantize.result_table),
    "quantize --calibrate": (quantize.result_facts, quantize.result_table),
}


@dataclass(frozen=True)
class FinishCommand:
    """Options of mtp-export finish."""

    output_dir: Path = field(
        metadata=argument(
            "Output folder of the runs with --share.", "OUT", parse_path, Access.WRITTEN
        )
    )
    proving: Proving = Proving()
    report: Path | None = field(default=None, metadata=REPORT)
    reporting: QuietReporting = QuietReporting()


def finish(options: FinishCommand) -> None:
    """Finish a bundle that was made in shares: check that all are there, write configs and
    manifest."""
    refuse_unprintable(options.output_dir)
    options.proving.check()
    request = shared_request(options.output_dir)
    _check_proof(options, request.planner)
    inputs = {f"source {place}": place for place in request.inputs}
    refuse_overlaps(inputs, {"--report": options.report})
    reports = try_reports({"--report": options.report})
    with gc_paused():
        plan = shared_plan(request)
    result = finish_shares(plan)
    facts_of, table_of = _FORMS[request.planner]
    facts, table = facts_of(result), table_of(result)
    proof = None
    if request.planner == "graft":
        proof = options.proving.proof(options.output_dir, quiet=options.reporting.quiet)
        facts = with_pairing(facts, proof)
        table = Group(table, proof.words)
    reports.write({"--report": lambda: json_text(facts)})
    print_result(facts, table, options.reporting)
    if proof is not None:
        proof.raise_if_failed()


def _check_proof(options: FinishCommand, planner: str) -> None:
    """Refuse a proof of parts that were one model from the start (UsageError)."""
    if options.proving.prove and planner != "graft":
        raise UsageError(
            "Only a graft's pairing is proven: both parts of any other bundle are one checkpoint's",
            where=options.output_dir,
            expected="shares of mtp-export graft",
            found=f"shares of mtp-export {planner}",
            todo="Leave --prove out, and run mtp-export verify on the bundle when it is whole",
        )
