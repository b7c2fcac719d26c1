"""Commands of the program, put together, and its exit codes."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence

import typer

from mtp_export.commands.export import export
from mtp_export.commands.failures import failure_of
from mtp_export.commands.generate import generate
from mtp_export.commands.graft import graft
from mtp_export.commands.inspect import inspect
from mtp_export.commands.push import push
from mtp_export.commands.quantize import quantize
from mtp_export.commands.standard_streams import guarded_streams
from mtp_export.commands.verify import verify
from mtp_export.errors import Interrupted, UsageError

app = typer.Typer(rich_markup_mode="rich", pretty_exceptions_enable=False)
app.callback(invoke_without_command=True)(export)
for command in (quantize, graft, verify, generate, inspect, push):
    app.command()(command)


def exit_code(arguments: Sequence[str]) -> int:
    """Run a command and return the program's exit code; a failure is one paragraph on stderr."""
    with guarded_streams():
        try:
            try:
                return _run([argument for argument in arguments if argument != "--debug"])
            finally:
                sys.stdout.flush()
        except SystemExit:
            raise
        except BaseException as error:
            if "--debug" in arguments:
                traceback.print_exc()
            failure = failure_of(error)
            print(f"mtp-export: error: {failure.message}", file=sys.stderr)
            return failure.exit_code


def _run(arguments: Sequence[str]) -> int:
    """Run a command and return its own exit code.

    Raises UsageError for arguments that cannot be parsed, and what the command raises.
    """
    try:
        code = app(list(arguments), standalone_mode=False, prog_name="mtp-export")
    except typer.TyperException as error:
        raise UsageError(" ".join(error.format_message().split())) from None
    except typer.Abort:
        raise KeyboardInterrupt from None
    if code == Interrupted.exit_code:  # Typer returns it for Ctrl-C
        raise KeyboardInterrupt
    return code if isinstance(code, int) else 0
