"""mtp-export push: upload a verified bundle to the Hugging Face Hub, with a model card."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType

from mtp_export.commands.output import (
    DRY_RUN,
    FiguresTable,
    QuietReporting,
    heading,
    print_result,
)
from mtp_export.progress import counted, format_bytes
from mtp_export.publish.options import PushOptions

if TYPE_CHECKING:  # they bring an HTTP client
    from mtp_export.publish.plan import PushPlan
    from mtp_export.publish.push import PushResult


@dataclass(frozen=True)
class PushCommand:
    """Options of mtp-export push."""

    push: PushOptions
    dry_run: bool = field(default=False, metadata=DRY_RUN)
    reporting: QuietReporting = QuietReporting()


def push(options: PushCommand) -> None:
    """Upload a verified bundle to the Hugging Face Hub, with a model card."""
    from mtp_export.commands.progress_bar import progress_bar
    from mtp_export.publish.plan import plan_push
    from mtp_export.publish.push import run_push

    show_progress = partial(progress_bar, quiet=options.reporting.quiet)
    plan = plan_push(options.push, show_progress, dry_run=options.dry_run)
    if options.dry_run:
        print_result(plan_facts(plan), plan_table(plan), options.reporting)
    else:
        result = run_push(plan, show_progress)
        print_result(result_facts(result), result_table(result), options.reporting)


def plan_facts(plan: PushPlan) -> dict[str, Any]:
    """Return the plan of a push: paths in the repository, sizes in bytes."""
    sizes, state = plan.sizes, plan.state
    groups = {"uploaded": plan.uploads, "copied": (*plan.sources,), "kept": (*sorted(plan.kept),)}
    return {
        "bundle": str(plan.options.bundle),
        "repository": plan.repository.name,
        "private": plan.options.private if state is None else state.private,
        "new": state is None,
        "parts": list(plan.content.parts),
        "verified": plan.verdict,
        "base_model": None if plan.base is None else plan.base.name,
        **{name: list(paths) for name, paths in groups.items()},
        **{f"{name}_bytes": sum(sizes[p] for p in paths) for name, paths in groups.items()},
        "removed": list(plan.removed),
    }


def result_facts(result: PushResult) -> dict[str, Any]:
    """Return a finished push: as its plan, with the commit and the number of files compared."""
    return plan_facts(result.plan) | {
        "commit": result.commit,
        "checked_files": len(result.plan.sizes),
        "seconds": round(result.seconds, 3),
    }


def plan_table(plan: PushPlan) -> RenderableType:
    """Return the plan of a dry run for people."""
    title = heading(f"Plan for {plan.repository.address}")
    return Group(title, _table(plan), *_lines(plan), "Nothing was uploaded.")


def result_table(result: PushResult) -> RenderableType:
    """Return a finished push for people."""
    plan = result.plan
    title = heading(f"Pushed to {plan.repository.address}")
    checked = (
        f"The Hub lists all {counted(len(plan.sizes), 'file')} with the sizes and checksums that"
        f" they have here, in commit {result.commit}."
    )
    page = f"{plan.repository.client.endpoint}/{plan.repository.name}"
    return Group(title, _table(plan), *_lines(plan), checked, page)


def _table(plan: PushPlan) -> FiguresTable:
    facts, table = plan_facts(plan), FiguresTable()
    table.add_words("files")
    table.add_figures("number", "bytes")
    titles = {
        "uploaded": "uploaded",
        "copied": "copied on the Hub",
        "kept": "there already",
    }
    for name, title in titles.items():
        table.add_row(title, str(len(facts[name])), format_bytes(facts[f"{name}_bytes"]))
    return table


def _lines(plan: PushPlan) -> list[str]:
    """Return the sentences about the repository and the bundle below the table."""
    state = plan.state
    private = plan.options.private if state is None else state.private
    kind = f"{'new ' if state is None else ''}{'private' if private else 'public'}"
    lines = [f"Repository: {kind}. Parts: {', '.join(plan.content.parts)}."]
    repositories = {source.repository for source in plan.sources.values()} - {None}
    lines += [f"Copied from {name}." for name in sorted(map(str, repositories))]
    if plan.removed:
        lines.append(f"Removed from the repository: {', '.join(plan.removed)}.")
    if plan.verdict is None:
        lines.append("Not verified; the model card says so.")
    return lines
