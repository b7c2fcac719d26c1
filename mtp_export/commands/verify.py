"""mtp-export verify: check a bundle, and report in a table and in files."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from mtp_checkpoints.errors import UsageError
from mtp_checkpoints.sources.byte_source import local_path
from mtp_export.bundle.options import (
    Share,
    parse_share,
    refuse_cluster_of_share,
)
from mtp_export.commands.garbage import gc_paused
from mtp_export.commands.output import (
    REPORT,
    QuietReporting,
    json_text,
    print_result,
    remark,
    show,
)
from mtp_export.commands.report_files import ReportFiles, try_reports
from mtp_export.options import (
    Access,
    Panel,
    option,
    parse_cluster,
    path_option,
)
from mtp_export.progress import counted, format_bytes
from mtp_export.verify.check import Level, Status
from mtp_export.verify.options import VerifyOptions

if TYPE_CHECKING:
    from mtp_export.commands.progress_bar import Standby
    from mtp_export.verify.context import Context
    from mtp_export.verify.report.report import Report as VerifyReport
    from mtp_runtime.parallel.group import Group as ProcessGroup


@dataclass(frozen=True)
class VerifyCommand:
    """Options of mtp-export verify."""

    verification: VerifyOptions = VerifyOptions()
    share: Share | None = field(
        default=None,
        metadata=option(
            "Read share I of N into --workdir, for a run without it to join; slurm: by the task.",
            Panel.PERFORMANCE,
            metavar="I/N",
            parser=parse_share,
        ),
    )
    cluster: str | None = field(
        default=None,
        metadata=option(
            "Read the bytes on a Ray cluster: local, auto or ray://HOST:PORT.",
            Panel.PERFORMANCE,
            metavar="ADDRESS",
            parser=parse_cluster,
        ),
    )
    report: Path | None = field(default=None, metadata=REPORT)
    junit: Path | None = field(
        default=None,
        metadata=path_option(
            "Write a JUnit file, for CI.", Panel.REPORT, "FILE.xml", access=Access.WRITTEN
        ),
    )
    html: Path | None = field(
        default=None,
        metadata=path_option(
            "Write an HTML page with plots.", Panel.REPORT, "FILE.html", access=Access.WRITTEN
        ),
    )
    summary: Path | None = field(
        default=None,
        metadata=path_option(
            "Write the page that is printed as Markdown, for $GITHUB_STEP_SUMMARY.",
            Panel.REPORT,
            "FILE.md",
            access=Access.WRITTEN,
        ),
    )
    golden: Path | None = field(
        default=None,
        metadata=path_option(
            "Write tokens, drafts and log-probabilities, to compare engines with.",
            Panel.REPORT,
            "FILE.jsonl",
            access=Access.WRITTEN,
        ),
    )
    dry_run: bool = field(
        default=False,
        metadata=option("Show the memory that level run takes, and check nothing.", Panel.CHECKS),
    )
    verbose: bool = field(
        default=False, metadata=option("Show every item in a table too.", Panel.REPORT)
    )
    strict: bool = field(
        default=False,
        metadata=option(
            "Fail on items that are not tested, but for checks that the options leave out.",
            Panel.CHECKS,
        ),
    )
    reporting: QuietReporting = QuietReporting()


def verify(options: VerifyCommand, context: typer.Context) -> None:
    """Verify that a bundle is what it claims to be: its files, its weights, and how it decodes."""
    verification, share, reporting = options.verification, options.share, options.reporting
    if share is not None:
        _check_share(verification, share, options.cluster)
    if options.golden is not None:
        _check_whole(verification, "--golden", "A golden file holds what the whole model generates")
    if options.dry_run:
        _print_memory(options, context.obj)
        return
    reports = try_reports(
        {
            "--report": options.report,
            "--junit": options.junit,
            "--html": options.html,
            "--summary": options.summary,
        }
    )
    golden = try_reports({"--golden": options.golden})
    if share is not None:
        facts, table = _read_share(verification, share, quiet=reporting.quiet)
        reports.write({"--report": lambda: json_text(facts)})
        print_result(facts, table, reporting)
        return
    from mtp_export.commands.progress_bar import Standby, loading_bars

    quiet = reporting.quiet
    with Standby(quiet=quiet) as standby, loading_bars(quiet=quiet, standby=standby):
        subject = _opened(verification, context.obj, standby, quiet=quiet)
        finished = _run(subject, options.cluster, standby, quiet=quiet)
    from mtp_export.verify.report.report_json import report_json
    from mtp_export.verify.report.verdict import raise_if_failed, raise_if_not_tested

    _write_reports(finished, reports)
    # The page says what people need of it.
    facts = report_json(finished) if reporting.as_json else {}
    print_result(facts, _page(finished, options), reporting)
    if options.golden is not None and finished.status is Status.FAIL:
        remark(f"{options.golden} was not written: a golden file is of a model that passes")
    told = not (reporting.as_json or reporting.quiet)
    written = [options.html, options.report, options.junit, options.summary]
    try:
        raise_if_failed(finished, told=told)
        if options.strict:
            raise_if_not_tested(finished)
        if options.golden is not None:
            _write_golden(subject, golden, quiet=reporting.quiet)
            written.append(options.golden)
    finally:
        if told and any(written):
            show(Text(f"Report: {', '.join(str(path) for path in written if path)}"))


def _page(report: VerifyReport, options: VerifyCommand) -> RenderableType:
    """Return what is printed for people: all items if verbose, and the summary."""
    from mtp_export.verify.report.summary import Summary
    from mtp_export.verify.report.table import ItemTable

    shown: list[RenderableType] = [ItemTable(report)] if options.verbose else []
    shown.append(Summary(report, _next_step(report, options)))
    if not options.verbose:
        shown.append(Text(f"All {counted(sum(1 for _ in report.items), 'item')}: --verbose"))
    return Group(*shown)


def _next_step(report: VerifyReport, options: VerifyCommand) -> str:
    """Return the command that publishes a bundle that passed, with its report; "" without one."""
    from mtp_export.verify.report.report import BUNDLE

    passed = report.status is Status.PASS and report.facts["kind"] == BUNDLE
    if options.report is None or not passed:
        return ""
    bundle, file = quote(str(report.options.bundle)), quote(str(options.report))
    return f"mtp-export push {bundle} ORG/NAME --report {file}"


def _opened(
    options: VerifyOptions, group: ProcessGroup | None, standby: Standby, *, quiet: bool
) -> Context:
    from mtp_export.commands.progress_bar import count_bar, progress_bar
    from mtp_export.verify.context import Context

    standby.tell("Opening the checkpoint")
    with gc_paused():
        context = Context.open(
            options,
            standby.between(partial(progress_bar, quiet=quiet)),
            group,
            standby.between(partial(count_bar, quiet=quiet)),
        )
        if options.level > Level.FILES:
            standby.tell("Loading the runtime")
            import torch  # noqa: F401 (which all further checks need)
    return context


def _run(context: Context, cluster: str | None, standby: Standby, *, quiet: bool) -> VerifyReport:
    """Run the checks, with progress and a line per finished check on stderr unless quiet."""
    from mtp_export.verify import CHECKS, run_checks
    from mtp_export.verify.report.report import report_of

    start = time.monotonic()
    if cluster is not None:
        from mtp_export.cluster.verification import read_on_cluster

        read_on_cluster(cluster, context)
    results = []
    names = iter([*CHECKS, ""])
    standby.tell(next(names))
    # Level files lists tensors, others read them.
    with gc_paused() if context.options.level is Level.FILES else nullcontext():
        for result in run_checks(context):
            results.append(result)
            if not quiet and result.status is not Status.NOT_TESTED:
                remark(f"{result.name}: {result.status}, {result.seconds:.1f} s")
            standby.tell(next(names))
    return report_of(context, tuple(results), time.monotonic() - start)


def _write_reports(report: VerifyReport, files: ReportFiles) -> None:
    from mtp_export.verify.report.junit import junit_xml
    from mtp_export.verify.report.report_json import report_json
    from mtp_export.verify.report.summary import markdown

    files.write(
        {
            "--report": lambda: json_text(report_json(report)),
            "--junit": lambda: junit_xml(report),
            "--html": lambda: _html_page(report),
            "--summary": lambda: markdown(report),
        }
    )


def _html_page(report: VerifyReport) -> str:
    from mtp_export.verify.report.html import html_page  # with its templates' library

    return html_page(report)


def _write_golden(context: Context, files: ReportFiles, *, quiet: bool) -> None:
    from mtp_export.commands.progress_bar import loading_bars
    from mtp_export.verify.report.golden import golden_text

    start = time.monotonic()
    with loading_bars(quiet=quiet):
        text = golden_text(context)
    files.write({"--golden": lambda: text})
    if not quiet:
        remark(f"golden file: written, {time.monotonic() - start:.1f} s")


def _print_memory(options: VerifyCommand, group: ProcessGroup | None) -> None:
    """Print the memory that the model of level run takes (UsageError where none is loaded)."""
    from mtp_export.commands.memory_plan import print_memory_plan
    from mtp_export.commands.runtime import Runtime

    asked = options.verification
    _check_whole(asked, "--dry-run", "A dry run plans the memory of the whole model")
    if asked.mtp is not None:
        raise UsageError(
            "A dry run plans the memory of one folder",
            found="--mtp, which names another",
            todo="Leave --mtp or --dry-run out",
        )
    runtime = Runtime(device=asked.device, max_memory=asked.max_memory)
    print_memory_plan(local_path(asked.bundle), runtime, group, options.reporting)


def _check_whole(options: VerifyOptions, option: str, why: str) -> None:
    """Refuse what a bundle that is not run, or not as a whole, has no part in (UsageError)."""
    if options.level is Level.RUN and not options.stream:
        return
    found = "--stream" if options.stream else f"--level {options.level.name.lower()}"
    raise UsageError(
        why,
        expected=f"{option} at level run, without --stream",
        found=f"{option} with {found}",
        todo=f"Leave {found} out, or {option}",
    )


def _check_share(options: VerifyOptions, share: Share, cluster: str | None) -> None:
    """Refuse a share that leaves nothing for others, or reads none of it (UsageError)."""

    refuse_cluster_of_share(cluster)
    if options.workdir is None:
        raise UsageError(
            "A share of a verification needs a folder for what it finds",
            expected="--workdir DIR, the same for all shares",
            found=f"--share {share}",
        )
    if options.level is Level.RUN:
        raise UsageError(
            "Only bytes are read in shares",
            expected="--level files or --level weights",
            found=f"--share {share} at level run",
            todo="Run the shares at level weights, then verify at any level with their --workdir",
        )


def _read_share(options: VerifyOptions, share: Share, *, quiet: bool) -> tuple[dict[str, Any], str]:
    """Read a share of every part; return the result, also for people."""
    from mtp_export.commands.progress_bar import progress_bar
    from mtp_export.verify.context import Context

    start = time.monotonic()
    context = Context.open(options, partial(progress_bar, quiet=quiet))
    findings = context.walks.findings
    assert findings is not None, "there is a --workdir"
    size_bytes = 0
    for part in context.checkpoints:
        plan, known = context.walks.share(part, share)
        findings.keep(part, share, known)
        size_bytes += plan.size_bytes
    seconds = time.monotonic() - start
    facts = {
        "bundle": str(options.bundle),
        "share": str(share),
        "bytes": size_bytes,
        "seconds": round(seconds, 3),
    }
    return facts, (
        f"Share {share.number} of {share.count}{share.said} of {options.bundle}:"
        f" {format_bytes(size_bytes)} read in {seconds:.1f} s. When all shares are read, verify"
        " without --share and with the same --workdir."
    )
