"""The command line: options in, one call into the core, tables or JSON out. Only this and
commands/ print."""

from __future__ import annotations

import io
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from mtp_export import __version__
from mtp_export.bundle.build import BundleOptions
from mtp_export.bundle.export import plan_export
from mtp_export.bundle.split import Checksums, Part, SharedWeights
from mtp_export.checkpoint.plan import Link
from mtp_export.commands import options, tables
from mtp_export.commands.bundling import Command, Saying, carry_out
from mtp_export.commands.generate import generate
from mtp_export.commands.output import say
from mtp_export.commands.quantize import quantize
from mtp_export.commands.verify import verify
from mtp_export.errors import IoError, MtpExportError, ResourceError, UsageError
from mtp_export.inspection import inspect as inspect_checkpoint

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

_EXPORT = Command("export", tables.result_facts, tables.result_table, tables.export_remarks)


@app.callback(invoke_without_command=True)
def export(
    context: typer.Context,
    input_dir: options.InputDir = None,
    output_dir: options.OutputDir = None,
    part: options.PartOption = Part.BOTH,
    target: options.TargetOption = "hf",
    shared_weights: options.SharedWeightsOption = SharedWeights.KEEP,
    allow_untied: options.AllowUntied = False,
    link: options.LinkOption = Link.AUTO,
    checksums: options.ChecksumsOption = Checksums.WRITTEN,
    workers: options.Workers = options.DEFAULT_WORKERS,
    max_memory: options.MaxMemory = "4GiB",  # type: ignore[assignment]
    max_shard_size: options.MaxShardSize = "5GB",  # type: ignore[assignment]
    dry_run: options.DryRun = False,
    overwrite: options.Overwrite = False,
    no_resume: options.NoResume = False,
    report: options.Report = None,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
    version: options.Version = False,
) -> None:
    """Split a DeepSeek-V3-class checkpoint into a main and an MTP checkpoint."""
    if version:
        print(f"mtp-export {__version__}")
        return
    if context.invoked_subcommand is not None:
        given = [name for name in context.params if _was_given(context, name)]
        if given:
            raise UsageError(
                f"Options stand before the command {context.invoked_subcommand}",
                found=", ".join(f"--{n.removeprefix('as_').replace('_', '-')}" for n in given),
                todo="Write them after the command's name",
            )
        return
    if input_dir is None or output_dir is None:
        raise UsageError(
            "An export needs both folders",
            expected="--input-dir SRC --output-dir OUT",
            todo="See mtp-export --help",
        )
    chosen = BundleOptions(
        input_dir, output_dir, part, target, shared_weights, link, workers, max_memory,
        max_shard_size, overwrite, not no_resume, allow_untied, checksums,
    )  # fmt: skip
    saying = Saying(dry_run, report, as_json, quiet)
    carry_out(_EXPORT, lambda dry: plan_export(chosen, dry_run=dry), chosen, saying)


def _was_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


app.command()(quantize)
app.command()(generate)
app.command()(verify)


@app.command()
def inspect(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="A checkpoint folder.")],
    as_json: options.AsJson = False,
) -> None:
    """Show what a checkpoint holds, from its headers alone."""
    inspection = inspect_checkpoint(source)
    say(inspection.as_json(), tables.inspection_table(inspection), None, as_json, False)
    if inspection.problems:
        inspection.problems[0].raise_as_error(source, len(inspection.problems) - 1)


def _as_failure(error: BaseException) -> tuple[str, int] | None:
    """Message and exit code for what went wrong; None for what only a developer can mend."""
    if isinstance(error, MtpExportError):
        return str(error), error.exit_code
    if isinstance(error, typer.BadParameter.__mro__[2]):  # click's, which typer does not export
        return str(getattr(error, "format_message", error.__str__)()), 2
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return "Interrupted. Run the same command again: it goes on where it stopped.", 130
    if isinstance(error, MemoryError):
        return str(ResourceError("Out of memory", todo="Lower --max-memory or --workers")), 5
    if isinstance(error, OSError):
        failure = IoError("Reading or writing failed", where=error.filename, found=error.strerror)
        return str(failure), failure.exit_code
    return None


def main(arguments: Sequence[str] | None = None) -> None:
    """The program: runs a command, and ends with its exit code and one paragraph when it fails."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    code: Any = 0
    try:
        code = app(arguments, standalone_mode=False, prog_name="mtp-export")
        if code == 130:  # typer turns Ctrl-C into this
            raise KeyboardInterrupt
    except BaseException as error:
        if isinstance(error, SystemExit):
            raise
        if debug:
            traceback.print_exc()
        failure = _as_failure(error)
        if failure is None:
            failure = (f"Internal error: {error!r}. Please report it, with --debug's output.", 1)
        message, code = failure
        print(f"mtp-export: error: {message}", file=sys.stderr)
    sys.exit(code if isinstance(code, int) else 0)
