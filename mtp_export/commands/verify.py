"""mtp-export verify: hold a bundle against what it must be, and say so in a table and in files."""

from __future__ import annotations

import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mtp_export.checkpoint.files import write_bytes
from mtp_export.commands import options as common
from mtp_export.commands.output import check_place, remark, say, stderr
from mtp_export.errors import UsageError
from mtp_export.progress import shown

if TYPE_CHECKING:
    from mtp_export.verify.context import VerifyOptions
    from mtp_export.verify.report.report import Report

_MOST_DRAFTS = 5


class LevelName(StrEnum):
    """How deep to verify; `all` is the deepest that there is."""

    FILES = "files"
    WEIGHTS = "weights"
    RUN = "run"
    ALL = "all"


def parse_ks(text: str) -> tuple[int, ...]:
    """Numbers of drafts from a list such as 1,2,3 (UsageError)."""
    numbers = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 1 <= int(part) <= _MOST_DRAFTS for part in numbers):
        raise UsageError(
            "--k is no list of numbers of drafts",
            expected=f"numbers from 1 to {_MOST_DRAFTS}, as in 1,2,3",
            found=text,
        )
    return tuple(sorted({int(part) for part in numbers}))


_Bundle = Annotated[Path, typer.Argument(metavar="[BUNDLE]", help="The current folder by default.")]
_Source = Annotated[
    Path | None, typer.Option(help="The checkpoint or bundle that this one was made from.")
]
_Level = Annotated[LevelName, typer.Option("--level", help="How deep; each includes the last.")]
_Prompts = Annotated[
    Path | None,
    typer.Option(
        help='JSON lines: {"prompt": TEXT} or {"prompt_token_ids": [...]}; completion likewise.'
    ),
]
_NewTokens = Annotated[int, typer.Option(min=2, help="The most tokens put out a prompt.")]
_Ks = Annotated[str, typer.Option("--k", metavar="K,K,...", help="Drafts a step, 1 to 5.")]
_Device = Annotated[str, typer.Option(help="cpu or cuda.")]
_JUnit = Annotated[Path | None, typer.Option(metavar="FILE.xml", help="A JUnit file, for CI.")]
_Html = Annotated[Path | None, typer.Option(metavar="FILE.html", help="One page with plots.")]
_NoChecksums = Annotated[
    bool, typer.Option("--no-checksums", help="Read headers, not every byte, for level files.")
]
_Stream = Annotated[
    bool, typer.Option("--stream", help="Run the model layer by layer, in little memory.")
]
_Workdir = Annotated[
    Path | None, typer.Option(help="Where a streamed run keeps what it resumes from.")
]


def verify(
    bundle: _Bundle = Path("."),
    source: _Source = None,
    level: _Level = LevelName.ALL,
    prompts: _Prompts = None,
    max_new_tokens: _NewTokens = 128,
    k: _Ks = "1,2,3",
    device: _Device = "cpu",
    report: common.Report = None,
    junit: _JUnit = None,
    html: _Html = None,
    no_checksums: _NoChecksums = False,
    stream: _Stream = False,
    workdir: _Workdir = None,
    workers: common.Workers = common.DEFAULT_WORKERS,
    as_json: common.AsJson = False,
    quiet: common.Quiet = False,
) -> None:
    """Prove that a bundle is what it says: files, weights, and how it decodes."""
    from mtp_export.verify.check import Level
    from mtp_export.verify.context import VerifyOptions
    from mtp_export.verify.report.html import html_page
    from mtp_export.verify.report.junit import junit_xml
    from mtp_export.verify.report.table import report_table

    chosen = VerifyOptions(
        bundle,
        source,
        Level.RUN if level is LevelName.ALL else Level[level.name],
        prompts,
        max_new_tokens,
        parse_ks(k),
        device,
        not no_checksums,
        stream,
        workdir,
        workers,
    )
    folders = [bundle] if source is None else [bundle, source]
    for option, path in (("--report", report), ("--junit", junit), ("--html", html)):
        check_place(option, path, *folders)
    finished = _run(chosen, quiet)
    for path, render in ((junit, junit_xml), (html, html_page)):
        if path is not None:
            write_bytes(path, render(finished).encode())
    say(finished.as_json(), report_table(finished), report, as_json, quiet)
    finished.raise_if_failed()


def _run(chosen: VerifyOptions, quiet: bool) -> Report:
    from mtp_export.verify import run_checks
    from mtp_export.verify.context import Context
    from mtp_export.verify.report.report import report_of

    start = time.monotonic()
    context = Context.open(chosen, lambda title, total: shown(stderr(), title, total, quiet))
    results = []
    for result in run_checks(context):
        results.append(result)
        if not quiet:
            remark(f"{result.name}: {result.status}, {result.seconds:.1f} s")
    return report_of(context, tuple(results), time.monotonic() - start)
