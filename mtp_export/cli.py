"""Program mtp-export: its commands, and its exit codes."""

from __future__ import annotations

import io
import sys
import traceback
from collections.abc import Sequence

import typer

from mtp_export.commands.export import export
from mtp_export.commands.failures import INTERRUPTED, failure_of
from mtp_export.commands.generate import generate
from mtp_export.commands.inspect import inspect
from mtp_export.commands.quantize import quantize
from mtp_export.commands.verify import verify

app = typer.Typer(rich_markup_mode="rich", pretty_exceptions_enable=False)
app.callback(invoke_without_command=True)(export)
for command in (quantize, verify, generate, inspect):
    app.command()(command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit with its code; a failure is one paragraph on stderr."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = app(
            [argument for argument in given if argument != "--debug"],
            standalone_mode=False,
            prog_name="mtp-export",
        )
        if code == INTERRUPTED:  # Typer returns it for Ctrl-C
            raise KeyboardInterrupt
    except SystemExit:
        raise
    except BaseException as error:
        if "--debug" in given:
            traceback.print_exc()
        failure = failure_of(error)
        print(f"mtp-export: error: {failure.message}", file=sys.stderr)
        code = failure.exit_code
    sys.exit(code if isinstance(code, int) else 0)
