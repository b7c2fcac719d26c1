"""Options and course of the commands that make a bundle: plan, run or make a share, report."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Group, RenderableType

from mtp_checkpoints.errors import UsageError
from mtp_checkpoints.sources.byte_source import Place
from mtp_export.bundle.build import BundleResult, Maker, make_shards, run_bundle
from mtp_export.bundle.bundle_plan import BundlePlan
from mtp_export.bundle.options import (
    BundleOptions,
    ContentOptions,
    Part,
    RunOptions,
    Share,
    parse_share,
    refuse_cluster_of_share,
)
from mtp_export.bundle.request import Request
from mtp_export.bundle.shares import run_share
from mtp_export.commands.bundle_tables import (
    plan_facts,
    plan_table,
    planned_facts,
    planned_line,
    share_facts,
    share_table,
)
from mtp_export.commands.output import (
    DRY_RUN,
    REPORT,
    QuietReporting,
    json_text,
    print_result,
    remark,
)
from mtp_export.commands.report_files import ReportFiles, try_reports
from mtp_export.commands.typed_command import words_of
from mtp_export.options import Access, Names, Panel, option, parse_cluster, path_option

_Path = TypeVar("_Path", bound=Place)
# Options of one run that the command does not have which goes on with it, or has of its folder.
_OF_ONE_RUN = ("--output-dir", "--share", "--no-resume", "--overwrite")
PART = option(
    "Part to write: {names}; the last is both in the same files, for llama.cpp.",
    Panel.CONTENT,
    metavar="PART",
)
OUTPUT = path_option(
    "Bundle to write: main/, mtp/ and mtp_export.json in this folder; --dry-run needs none.",
    Panel.INPUT_OUTPUT,
    "DIR",
    access=Access.WRITTEN,
)


def given_once(name: str, argument: _Path | None, flag: str, given: _Path | None) -> _Path | None:
    """Return a path or address that an argument or an option names; None without either (UsageError
    for both)."""
    if argument is not None and given is not None:
        raise UsageError(
            f"{name} is given twice",
            expected=f"the argument or {flag}",
            found=f"{argument} and {given}",
        )
    return given if argument is None else argument


def command_of(name: str, options: Any) -> tuple[str, ...]:
    """Return the words of a command that makes a bundle, as RunOptions has them."""
    return words_of(name, options, without=_OF_ONE_RUN)


@dataclass(frozen=True)
class Making:
    """Options that every command has that makes a bundle."""

    target: str = field(
        default="hf",
        metadata=option(
            "Loader of the MTP part: {names}.",
            Panel.CONTENT,
            metavar="ENGINE",
            values=Names.TARGET,
        ),
    )
    content: ContentOptions = ContentOptions()
    share: Share | None = field(
        default=None,
        metadata=option(
            "Make share I of N, then end with mtp-export finish; slurm: by the task of an array.",
            Panel.PERFORMANCE,
            metavar="I/N",
            parser=parse_share,
        ),
    )
    cluster: str | None = field(
        default=None,
        metadata=option(
            "Make the shards on a Ray cluster: local, auto or ray://HOST:PORT.",
            Panel.PERFORMANCE,
            metavar="ADDRESS",
            parser=parse_cluster,
        ),
    )
    run: RunOptions = RunOptions()
    dry_run: bool = field(default=False, metadata=DRY_RUN)
    report: Path | None = field(default=None, metadata=REPORT)
    reporting: QuietReporting = QuietReporting()

    def bundle(
        self,
        input_dir: Place,
        output_dir: Path | None,
        part: Part = Part.BOTH,
        *,
        command: tuple[str, ...],
    ) -> BundleOptions:
        """Return the options of a bundle (UsageError where some contradict each other, and where
        a bundle that is not only planned has no folder). command: as RunOptions has it."""
        if output_dir is None:
            output_dir = self._planned_output(input_dir)
        if self.share is not None and self.run.overwrite:
            raise UsageError(
                "Shares do not replace a bundle",
                expected="--share or --overwrite",
                found="both",
                todo="Write the shares into a new folder, or remove the finished bundle first",
            )
        if self.share is not None:
            refuse_cluster_of_share(self.cluster)
        content = replace(self.content, part=part)
        run = replace(self.run, share=self.share, command=command)
        return BundleOptions(input_dir, output_dir, self.target, content, run)

    def _planned_output(self, source: Place) -> Path:
        """Return a folder that is not there yet, beside a local source or in the current folder: a
        dry run without an output plans for it."""
        if not self.dry_run:
            raise UsageError(
                "The bundle has no folder",
                expected="--output-dir OUT",
                found="none",
                todo="Name one; --dry-run plans without",
            )
        folder = source.resolve() if isinstance(source, Path) else Path.cwd() / "export"
        names = (f"{folder.name}-bundle{number}" for number in ("", *map(str, range(2, 1 << 16))))
        return next(p for p in (folder.parent / name for name in names) if not os.path.lexists(p))

    def try_reports(self) -> ReportFiles:
        """Try the places of reports (UsageError)."""
        return try_reports({"--report": self.report})


@dataclass(frozen=True)
class PlannedBundle:
    """A bundle that a command makes: planned, with the places of its reports tried.

    remarks are sentences on the plan that its tables do not say. maker makes the shards, unless a
    cluster does; None: this process, all at once.
    """

    request: Request
    making: Making
    plan: BundlePlan
    reports: ReportFiles
    remarks: Sequence[str]
    maker: Maker | None = None

    def run(self) -> BundleResult | None:
        """Make the bundle. A dry run and a share are reported here, and return None."""
        share = self.making.share
        if self.making.dry_run:
            facts, table = plan_facts(self.plan), plan_table(self.plan)
            if share is not None:
                facts |= planned_facts(self.plan, share)
                table = Group(table, planned_line(self.plan, share))
            self.report(facts, table)
            return None
        # It takes a fifth of a dry run's start.
        from mtp_export.commands.progress_bar import progress_bar

        total_bytes = sum(job.read_bytes for job in self.plan.share_jobs)
        quiet = self.making.reporting.quiet
        planner = self.request.planner
        with progress_bar(planner, total_bytes, quiet=quiet, waits=True) as progress:
            if share is None:
                return run_bundle(self.plan, progress, self._maker())
            made = run_share(self.request, self.plan, progress, self.maker)
        self.report(share_facts(made), share_table(made))
        return None

    def report(self, facts: dict[str, Any], table: RenderableType) -> None:
        """Write and print a result, with what the plan leaves out and the remarks, which people
        get on stderr."""
        remarks = [*self.plan.left_out, *self.remarks]
        facts |= {"remarks": remarks}
        self.reports.write({"--report": lambda: json_text(facts)})
        print_result(facts, table, self.making.reporting)
        if not (self.making.reporting.quiet or self.making.reporting.as_json):
            for line in remarks:
                remark(line)

    def _maker(self) -> Maker:
        """Return what makes the shards: this process, or a cluster."""
        if self.making.cluster is None:
            return self.maker or make_shards
        from mtp_export.cluster.shards import RayCluster

        return RayCluster(self.making.cluster, self.request)
