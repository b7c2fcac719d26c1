"""mtp-export push: upload a verified bundle to the Hugging Face Hub, with a model card."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType

from mtp_checkpoints.sources.byte_source import Address
from mtp_export.bundle.options import Part
from mtp_export.commands import options as shared
from mtp_export.commands.output import FiguresTable, heading, print_result
from mtp_export.progress import format_bytes

if TYPE_CHECKING:  # they bring an HTTP client
    from mtp_export.publish.plan import PushPlan
    from mtp_export.publish.push import PushResult

MODEL_CARD = "Model card"

Bundle = Annotated[
    Path, typer.Argument(parser=shared.parse_path, metavar="BUNDLE", help="Bundle to upload.")
]
Repository = Annotated[
    Address, typer.Argument(parser=Address, metavar="NAME", help="Repository on the Hub: org/name.")
]
PushedPart = Annotated[
    Part | None,
    typer.Option(
        "--part",
        metavar="PART",
        rich_help_panel=shared.CONTENT,
        help="Part to upload: both, main or mtp; by default all that the bundle has.",
    ),
]
Private = Annotated[
    bool,
    typer.Option(
        "--private", rich_help_panel=shared.INPUT_OUTPUT, help="Make a repository that is private."
    ),
]
Overwrite = Annotated[
    bool,
    typer.Option(
        "--overwrite",
        rich_help_panel=shared.INPUT_OUTPUT,
        help="Replace the model that the repository has.",
    ),
]
Verified = Annotated[
    Path | None,
    typer.Option(
        "--report",
        parser=shared.parse_path,
        metavar="FILE.json",
        rich_help_panel=MODEL_CARD,
        help="Report of mtp-export verify on this bundle.",
    ),
]
Unverified = Annotated[
    bool,
    typer.Option(
        "--unverified",
        rich_help_panel=MODEL_CARD,
        help="Upload a bundle without a report that it passed.",
    ),
]
BaseModel = Annotated[
    Address | None,
    typer.Option(
        "--base-model",
        parser=lambda text: Address(text if "://" in text else f"hf://{text}"),
        metavar="NAME",
        rich_help_panel=MODEL_CARD,
        help="Model on the Hub that the bundle was made from: org/name or org/name@REVISION.",
    ),
]


def push(
    context: typer.Context,
    bundle: Bundle,
    repository: Repository,
    private: Private = False,
    overwrite: Overwrite = False,
    dry_run: shared.DryRun = False,
    part: PushedPart = None,
    report: Verified = None,
    unverified: Unverified = False,
    base_model: BaseModel = None,
    as_json: shared.AsJson = False,
    quiet: shared.Quiet = False,
) -> None:
    """Upload a verified bundle to the Hugging Face Hub, with a model card."""
    from mtp_export.commands.progress_bar import progress_bar
    from mtp_export.publish.plan import PushOptions, plan_push
    from mtp_export.publish.push import run_push

    options = PushOptions(
        bundle=bundle,
        repository=repository,
        part=part,
        private=private,
        overwrite=overwrite,
        report=report,
        unverified=unverified,
        base_model=base_model,
    )
    show_progress = partial(progress_bar, quiet=quiet)
    plan = plan_push(options, show_progress, dry_run=dry_run)
    reporting = shared.reporting_options(context)
    if dry_run:
        print_result(plan_facts(plan), plan_table(plan), reporting)
    else:
        result = run_push(plan, show_progress)
        print_result(result_facts(result), result_table(result), reporting)


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
        f"The Hub lists all {len(plan.sizes)} files with the sizes and checksums that they have"
        f" here, in commit {result.commit}."
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
