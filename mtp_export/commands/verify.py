"""mtp-export verify: check a bundle, and report in a table and in files."""

from __future__ import annotations

import time
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mtp_checkpoints.errors import UsageError
from mtp_export.bundle.options import Share
from mtp_export.commands import options as shared
from mtp_export.commands import runtime
from mtp_export.commands.garbage import few_collections
from mtp_export.commands.output import json_text, print_result, remark
from mtp_export.commands.report_files import ReportFiles, try_reports
from mtp_export.progress import format_bytes

if TYPE_CHECKING:
    from mtp_export.verify.check import Level
    from mtp_export.verify.context import VerifyOptions
    from mtp_export.verify.report.report import Report as VerifyReport
    from mtp_runtime.parallel.group import Group

MAX_DRAFTS = 5
CHECKS, DECODING, PERFORMANCE, REPORT = "Checks", shared.DECODING, shared.PERFORMANCE, shared.REPORT


class LevelName(StrEnum):
    """Depth of a verification; `all` is the deepest that there is."""

    FILES = "files"
    WEIGHTS = "weights"
    RUN = "run"
    ALL = "all"

    @property
    def depth(self) -> Level:
        """The level of the checks."""
        from mtp_export.verify.check import Level

        return Level.RUN if self is LevelName.ALL else Level[self.name]


def parse_ks(text: str) -> tuple[int, ...]:
    """Return the numbers of drafts in a list such as 1,2,3 (UsageError)."""
    numbers = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 1 <= int(part) <= MAX_DRAFTS for part in numbers):
        raise UsageError(
            "--k is no list of numbers of drafts",
            expected=f"numbers from 1 to {MAX_DRAFTS}, as in 1,2,3",
            found=text,
        )
    return tuple(sorted({int(part) for part in numbers}))


Bundle = Annotated[
    Path,
    typer.Argument(
        parser=shared.parse_path, metavar="BUNDLE", help="Bundle; by default the current folder."
    ),
]
Source = Annotated[
    Path | None,
    typer.Option(
        parser=shared.parse_path,
        metavar="DIR",
        rich_help_panel=CHECKS,
        help="Checkpoint or bundle that this bundle was made from, to compare with.",
    ),
]
LevelOption = Annotated[
    LevelName,
    typer.Option(
        "--level",
        metavar="LEVEL",
        rich_help_panel=CHECKS,
        help="Depth: files, weights, run or all; each includes those before it.",
    ),
]
NoChecksums = Annotated[
    bool,
    typer.Option(
        "--no-checksums",
        rich_help_panel=CHECKS,
        help="Read headers instead of every byte for level files.",
    ),
]
Prompts = Annotated[
    Path | None,
    typer.Option(
        parser=shared.parse_path,
        metavar="FILE.jsonl",
        rich_help_panel=DECODING,
        help='JSON lines: {"prompt": TEXT} or {"prompt_token_ids": [...]}; completion likewise.',
    ),
]
NewTokens = Annotated[
    int,
    typer.Option(
        min=2, metavar="N", rich_help_panel=DECODING, help="Maximum new tokens per prompt."
    ),
]
Ks = Annotated[
    str,
    typer.Option(
        "--k",
        metavar="K,K,...",
        rich_help_panel=DECODING,
        help="Numbers of draft tokens per step, 1 to 5.",
    ),
]
Stream = Annotated[
    bool,
    typer.Option(
        "--stream",
        rich_help_panel=PERFORMANCE,
        help="Run the model layer by layer, in little memory.",
    ),
]
Workdir = Annotated[
    Path | None,
    typer.Option(
        parser=shared.parse_path,
        metavar="DIR",
        rich_help_panel=PERFORMANCE,
        help="Folder in which a streamed run, or a share, keeps what a later run goes on from.",
    ),
]
ShareOption = Annotated[
    Share | None,
    typer.Option(
        "--share",
        parser=shared.parse_share,
        metavar="I/N",
        rich_help_panel=PERFORMANCE,
        help="Read share I of N into --workdir, for a run without it to join; slurm: by the task.",
    ),
]
ClusterOption = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        parser=shared.parse_cluster,
        metavar="ADDRESS",
        rich_help_panel=PERFORMANCE,
        help="Read the bytes on a Ray cluster: local, auto or ray://HOST:PORT.",
    ),
]
JUnit = Annotated[
    Path | None,
    typer.Option(
        parser=shared.parse_path,
        metavar="FILE.xml",
        rich_help_panel=REPORT,
        help="Write a JUnit file, for CI.",
    ),
]
Html = Annotated[
    Path | None,
    typer.Option(
        parser=shared.parse_path,
        metavar="FILE.html",
        rich_help_panel=REPORT,
        help="Write an HTML page with plots.",
    ),
]


def verify(
    context: typer.Context,
    bundle: Bundle = Path("."),
    source: Source = None,
    level: LevelOption = LevelName.ALL,
    no_checksums: NoChecksums = False,
    prompts: Prompts = None,
    max_new_tokens: NewTokens = 128,
    k: Ks = "1,2,3",
    device: runtime.FloatDevice = "cpu",
    stream: Stream = False,
    workdir: Workdir = None,
    share: ShareOption = None,
    cluster: ClusterOption = None,
    workers: shared.Workers = shared.DEFAULT_WORKERS,
    report: shared.Report = None,
    junit: JUnit = None,
    html: Html = None,
    as_json: shared.AsJson = False,
    quiet: shared.Quiet = False,
) -> None:
    """Verify that a bundle is what it claims to be: its files, its weights, and how it decodes."""
    from mtp_export.verify.context import VerifyOptions
    from mtp_export.verify.report.table import report_table

    options = VerifyOptions(
        bundle=bundle,
        source=source,
        level=level.depth,
        prompts=prompts,
        max_new_tokens=max_new_tokens,
        ks=parse_ks(k),
        device=device,
        checksums=not no_checksums,
        stream=stream,
        workdir=workdir,
        workers=workers,
    )
    if share is not None:
        _check_share(options, share, cluster)
    taken = [path for path in (bundle, source, prompts) if path is not None]
    reports = try_reports({"--report": report, "--junit": junit, "--html": html}, taken)
    if share is not None:
        facts, table = _read_share(options, share, quiet=quiet)
        reports.write({"--report": lambda: json_text(facts)})
        print_result(facts, table, shared.reporting_options(context))
        return
    finished = _run(options, cluster, context.obj, quiet=quiet)
    _write_reports(finished, reports)
    print_result(finished.as_json(), report_table(finished), shared.reporting_options(context))
    finished.raise_if_failed()


def _run(
    options: VerifyOptions, cluster: str | None, group: Group | None, *, quiet: bool
) -> VerifyReport:
    """Run the checks, with progress and a line per finished check on stderr unless quiet."""
    from mtp_export.commands.progress_bar import progress_bar
    from mtp_export.verify import run_checks
    from mtp_export.verify.check import Level
    from mtp_export.verify.context import Context
    from mtp_export.verify.report.report import report_of

    with few_collections():
        context = Context.open(options, partial(progress_bar, quiet=quiet), group)
        if options.level > Level.FILES:
            import torch  # noqa: F401 (which all further checks need)
    start = time.monotonic()
    if cluster is not None:
        from mtp_export.cluster.verification import read_on_cluster

        read_on_cluster(cluster, context)
    results = []
    for result in run_checks(context):
        results.append(result)
        if not quiet:
            remark(f"{result.name}: {result.status}, {result.seconds:.1f} s")
    return report_of(context, tuple(results), time.monotonic() - start)


def _write_reports(report: VerifyReport, files: ReportFiles) -> None:
    from mtp_export.verify.report.html import html_page
    from mtp_export.verify.report.junit import junit_xml

    files.write(
        {
            "--report": lambda: json_text(report.as_json()),
            "--junit": lambda: junit_xml(report),
            "--html": lambda: html_page(report),
        }
    )


def _check_share(options: VerifyOptions, share: Share, cluster: str | None) -> None:
    """Refuse a share that leaves nothing for others, or reads none of it (UsageError)."""
    from mtp_export.verify.check import Level

    shared.refuse_cluster_of_share(cluster)
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
    assert context.findings is not None, "there is a --workdir"
    size_bytes = 0
    for part in context.opened_parts:
        plan, known = context.walk_share(part.name, share)
        context.findings.keep(part.name, share, known)
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
