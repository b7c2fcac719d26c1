"""mtp-export verify: check a bundle, and report in a table and in files."""

from __future__ import annotations

import time
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mtp_export.commands import options as shared
from mtp_export.commands.output import json_text, print_result, remark
from mtp_export.commands.report_files import ReportFiles, try_reports
from mtp_export.errors import UsageError

if TYPE_CHECKING:
    from mtp_export.verify.context import VerifyOptions
    from mtp_export.verify.report.report import Report as VerifyReport

MAX_DRAFTS = 5
CHECKS, DECODING, PERFORMANCE, REPORT = "Checks", shared.DECODING, shared.PERFORMANCE, shared.REPORT


class LevelName(StrEnum):
    """Depth of a verification; `all` is the deepest that there is."""

    FILES = "files"
    WEIGHTS = "weights"
    RUN = "run"
    ALL = "all"


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
Device = Annotated[
    str, typer.Option(metavar="NAME", rich_help_panel=PERFORMANCE, help="cpu or cuda.")
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
        help="Folder in which a streamed run keeps what it resumes from.",
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
    device: Device = "cpu",
    stream: Stream = False,
    workdir: Workdir = None,
    workers: shared.Workers = shared.DEFAULT_WORKERS,
    report: shared.Report = None,
    junit: JUnit = None,
    html: Html = None,
    as_json: shared.AsJson = False,
    quiet: shared.Quiet = False,
) -> None:
    """Verify that a bundle is what it claims to be: its files, its weights, and how it decodes."""
    from mtp_export.verify.check import Level
    from mtp_export.verify.context import VerifyOptions
    from mtp_export.verify.report.table import report_table

    options = VerifyOptions(
        bundle=bundle,
        source=source,
        level=Level.RUN if level is LevelName.ALL else Level[level.name],
        prompts=prompts,
        max_new_tokens=max_new_tokens,
        ks=parse_ks(k),
        device=device,
        checksums=not no_checksums,
        stream=stream,
        workdir=workdir,
        workers=workers,
    )
    taken = [path for path in (bundle, source, prompts) if path is not None]
    reports = try_reports({"--report": report, "--junit": junit, "--html": html}, taken)
    finished = _run(options, quiet=quiet)
    _write_reports(finished, reports)
    print_result(finished.as_json(), report_table(finished), shared.reporting_options(context))
    finished.raise_if_failed()


def _run(options: VerifyOptions, *, quiet: bool) -> VerifyReport:
    """Run the checks, with progress and a line per finished check on stderr unless quiet."""
    from mtp_export.commands.progress_bar import progress_bar
    from mtp_export.verify import run_checks
    from mtp_export.verify.context import Context
    from mtp_export.verify.report.report import report_of

    start = time.monotonic()
    context = Context.open(options, partial(progress_bar, quiet=quiet))
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
