"""Commands of the program, put together."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from mtp_export.commands.export import export
from mtp_export.commands.failures import INTERRUPTED
from mtp_export.commands.generate import generate
from mtp_export.commands.inspect import inspect
from mtp_export.commands.quantize import quantize
from mtp_export.commands.verify import verify
from mtp_export.errors import UsageError

app = typer.Typer(rich_markup_mode="rich", pretty_exceptions_enable=False)
app.callback(invoke_without_command=True)(export)
for command in (quantize, verify, generate, inspect):
    app.command()(command)


def run(arguments: Sequence[str]) -> int:
    """Run a command and return its exit code.

    Raises UsageError for arguments that cannot be parsed, and what the command raises.
    """
    try:
        code = app(list(arguments), standalone_mode=False, prog_name="mtp-export")
    except typer.TyperException as error:
        raise UsageError(" ".join(error.format_message().split())) from None
    except typer.Abort:
        raise KeyboardInterrupt from None
    if code == INTERRUPTED:  # Typer returns it for Ctrl-C
        raise KeyboardInterrupt
    return code if isinstance(code, int) else 0
