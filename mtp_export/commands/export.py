"""mtp-export export, and mtp-export without a command: export a checkpoint as a bundle."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import typer
from rich.console import Group, RenderableType

from mtp_checkpoints.errors import UsageError
from mtp_checkpoints.layouts import target_of
from mtp_checkpoints.sources.byte_source import Place
from mtp_export import __version__
from mtp_export.bundle.build import BundleResult
from mtp_export.bundle.bundle_plan import BundlePlan
from mtp_export.bundle.export import plan_export
from mtp_export.bundle.options import Part
from mtp_export.bundle.request import Request
from mtp_export.commands.bundle_command import (
    OUTPUT,
    PART,
    Making,
    PlannedBundle,
    command_of,
    given_once,
)
from mtp_export.commands.bundle_tables import (
    effort,
    parts_table,
    result_facts,
    resumed,
    size_lines,
)
from mtp_export.commands.garbage import gc_paused
from mtp_export.commands.output import heading, json_text
from mtp_export.options import (
    Access,
    Panel,
    argument,
    option,
    parse_path,
    parse_source,
    source_option,
)
from mtp_export.progress import counted


@dataclass(frozen=True)
class ExportCommand:
    """Options of an export."""

    input_dir: Place | None = field(
        default=None,
        metadata=source_option(
            "Checkpoint: a folder of safetensors files, or hf://org/name\\[@revision]."
        ),
    )
    output_dir: Path | None = field(default=None, metadata=OUTPUT)
    part: Part = field(default=Part.BOTH, metadata=PART)
    making: Making = Making()


@dataclass(frozen=True)
class ExportOfArguments:
    """Options of mtp-export export, whose folders may be arguments."""

    source: Place | None = field(
        default=None,
        metadata=argument("The same as --input-dir.", "SRC", parse_source, Access.READ),
    )
    output: Path | None = field(
        default=None,
        metadata=argument("The same as --output-dir.", "OUT", parse_path, Access.WRITTEN),
    )
    exporting: ExportCommand = ExportCommand()


@dataclass(frozen=True)
class ProgramOptions:
    """Options of the program without a command: those of an export, and the version's."""

    exporting: ExportCommand = ExportCommand()
    version: bool = field(
        default=False,
        metadata=option(
            "Show the version and exit.", Panel.ALL_COMMANDS, short="-V", shows_and_exits=True
        ),
    )


def without_command(options: ProgramOptions, context: typer.Context) -> None:
    """Export, quantize and verify DeepSeek-V3-class checkpoints with their MTP module."""
    if options.version:
        _print_version(as_json=options.exporting.making.reporting.as_json)
        return
    if context.invoked_subcommand is not None:
        _refuse_options_before(context, context.invoked_subcommand)
        return
    _export(options.exporting)


def _print_version(*, as_json: bool) -> None:
    facts = {"name": "mtp-export", "version": __version__}
    print(json_text(facts) if as_json else " ".join(facts.values()), end="" if as_json else "\n")


def export(options: ExportOfArguments) -> None:
    """Export a DeepSeek-V3-class checkpoint as a bundle: main model and MTP module in folders of
    their own. It is what mtp-export does without a command too."""
    given = options.exporting
    source = given_once("The input", options.source, "--input-dir", given.input_dir)
    output = given_once("The output", options.output, "--output-dir", given.output_dir)
    _export(replace(given, input_dir=source, output_dir=output))


def _export(options: ExportCommand) -> None:
    is_planned = options.making.dry_run and options.input_dir is not None
    if options.input_dir is None or (options.output_dir is None and not is_planned):
        raise UsageError(
            "An export needs both folders",
            expected="--input-dir SRC --output-dir OUT, or --input-dir SRC --dry-run",
            todo="See mtp-export export --help",
        )
    making = options.making
    command = command_of("export", options)
    bundle = making.bundle(options.input_dir, options.output_dir, options.part, command=command)
    reports = making.try_reports()
    with gc_paused():
        plan = plan_export(bundle, dry_run=making.dry_run)
    planned = PlannedBundle(Request("export", bundle), making, plan, reports, remarks(plan))
    result = planned.run()
    if result is not None:
        planned.report(result_facts(result), result_table(result))


def _refuse_options_before(context: typer.Context, command: str) -> None:
    """Refuse options of the export where a command follows: they would be ignored (UsageError)."""
    given = [
        parameter.opts[0]
        for parameter in context.command.params
        if (source := context.get_parameter_source(parameter.name)) and source.name == "COMMANDLINE"
    ]
    if given:
        raise UsageError(
            f"Options stand before the command {command}",
            found=", ".join(given),
            todo="Write them after the command's name",
        )


def result_table(result: BundleResult) -> RenderableType:
    """Return the result of an export for people."""
    lines = [*size_lines(result.plan.sizes), effort(result), *resumed(result)]
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
    found += [
        f"{one.name} repeats {counted(len(one.pairs), 'tensor')} of the source's other files: it"
        " was passed over."
        for one in plan.checkpoint.repeated
    ]
    found += [
        f"{one.path.name} is not in the source's index, and none of its tensors is named like those"
        " of the model: it was passed over."
        for one in plan.checkpoint.strays
    ]
    target = target_of(plan.options.target)
    if plan.options.target == target.name:
        return found
    return [
        *found,
        f"--target {plan.options.target} is an alias: its layout is that of"
        f" --target {target.name}, and that is what was planned or written. The manifest has"
        " the engine's name.",
    ]
