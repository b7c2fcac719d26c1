"""mtp-export without a command: export a checkpoint as a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group, RenderableType

from mtp_checkpoints.errors import UsageError
from mtp_checkpoints.layouts import target_of
from mtp_checkpoints.sources.byte_source import Place
from mtp_export import __version__
from mtp_export.bundle.build import BundleResult
from mtp_export.bundle.bundle_plan import BundlePlan
from mtp_export.bundle.options import DEFAULT_WORKERS, Checksums, Part, SharedWeights
from mtp_export.bundle.request import Request
from mtp_export.commands import options as shared
from mtp_export.commands.bundle_command import BundleCommand, make_bundle
from mtp_export.commands.bundle_tables import effort, parts_table, result_facts, resumed
from mtp_export.commands.output import heading
from mtp_export.plan import Link

InputDir = Annotated[
    Place | None,
    shared.source_option(
        "Checkpoint: a folder of safetensors files, or hf://org/name\\[@revision]."
    ),
]
OutputDir = Annotated[
    Path | None,
    typer.Option(
        parser=shared.parse_path,
        metavar="DIR",
        rich_help_panel=shared.INPUT_OUTPUT,
        help="Bundle to write: main/, mtp/ and mtp_export.json in this folder.",
    ),
]
Version = Annotated[bool, typer.Option("--version", help="Show the version and exit.")]


def export(
    context: typer.Context,
    input_dir: InputDir = None,
    output_dir: OutputDir = None,
    link: shared.LinkOption = Link.AUTO,
    overwrite: shared.Overwrite = False,
    no_resume: shared.NoResume = False,
    dry_run: shared.DryRun = False,
    part: shared.PartOption = Part.BOTH,
    target: shared.TargetOption = "hf",
    shared_weights: shared.SharedWeightsOption = SharedWeights.KEEP,
    allow_untied: shared.AllowUntied = False,
    max_shard_size: shared.MaxShardSize = shared.DEFAULT_MAX_SHARD_SIZE,
    checksums: shared.ChecksumsOption = Checksums.WRITTEN,
    share: shared.ShareOption = None,
    cluster: shared.ClusterOption = None,
    workers: shared.Workers = DEFAULT_WORKERS,
    io_depth: shared.IoDepth = None,
    max_memory: shared.MaxMemory = shared.DEFAULT_MAX_MEMORY,
    report: shared.Report = None,
    as_json: shared.AsJson = False,
    quiet: shared.Quiet = False,
    debug: shared.Debug = False,
    version: Version = False,
) -> None:
    """Export a DeepSeek-V3-class checkpoint as a bundle: main model and MTP module in folders of
    their own. The commands below quantize, verify, run and inspect what is there."""
    if version:
        print(f"mtp-export {__version__}")
    elif context.invoked_subcommand is not None:
        _refuse_options_before(context, context.invoked_subcommand)
    elif input_dir is None or output_dir is None:
        raise UsageError(
            "An export needs both folders",
            expected="--input-dir SRC --output-dir OUT",
            todo="See mtp-export --help",
        )
    else:
        options = shared.bundle_options(context, input_dir, output_dir)
        make_bundle(COMMAND, context, Request("export", options))


def _refuse_options_before(context: typer.Context, command: str) -> None:
    """Refuse options of the export where a command follows: they would be ignored (UsageError)."""
    given = [
        name
        for name in context.params
        if (source := context.get_parameter_source(name)) and source.name == "COMMANDLINE"
    ]
    if given:
        raise UsageError(
            f"Options stand before the command {command}",
            found=", ".join(f"--{n.removeprefix('as_').replace('_', '-')}" for n in given),
            todo="Write them after the command's name",
        )


def result_table(result: BundleResult) -> RenderableType:
    """Return the result of an export for people."""
    lines = [effort(result), *resumed(result)]
    missing = {"generation_config.json", "tokenizer.json"} - set(result.plan.parts[0].extra_files)
    if missing:
        lines.append(f"The source has no {' and no '.join(sorted(missing))}; engines may need it.")
    title = heading(f"Exported to {result.plan.options.output_dir}")
    return Group(title, parts_table(result.plan), *lines)


def remarks(plan: BundlePlan) -> list[str]:
    """Return remarks on shards that the source's index does not list, and on a target's name that
    is an alias of another's layout."""
    found = [
        f"{name} is not in the source's index; the bundle's index lists its tensors."
        for name in plan.checkpoint.unindexed
    ]
    target = target_of(plan.options.target)
    if plan.options.target == target.name:
        return found
    return [
        *found,
        f"--target {plan.options.target} is an alias: its layout is that of"
        f" --target {target.name}, and that is what was planned or written.",
    ]


COMMAND = BundleCommand(name="export", facts=result_facts, table=result_table, remarks=remarks)
