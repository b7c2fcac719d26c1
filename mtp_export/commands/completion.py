"""Completion of commands, options and values in a shell: Typer's scripts, shown or installed."""

from __future__ import annotations

from collections.abc import Sequence

import typer
from typer.core import TyperCommand, TyperGroup

from mtp_checkpoints.errors import UsageError
from mtp_checkpoints.suggestions import did_you_mean
from mtp_export.commands.names import names_of
from mtp_export.options import Names

COMPLETION_OPTIONS = ("--install-completion", "--show-completion")
COMPLETION_VARIABLE = "_MTP_EXPORT_COMPLETE"  # which the scripts set


def install_or_show(arguments: Sequence[str], program: TyperCommand | TyperGroup) -> None:
    """Install the script of a shell or print it, and exit; without a shell's name, that of the
    current one.

    Raises UsageError for a shell that has no script.
    """
    option, _, joined = arguments[0].partition("=")
    shells = names_of(Names.SHELL)
    given = [joined] if joined else list(arguments[1:])
    if given and (len(given) > 1 or given[0] not in shells):
        todo = did_you_mean(given[0], shells)
        raise _no_completion(option, " ".join(given), todo)
    from typer.completion import install_callback, show_callback

    run = install_callback if option == COMPLETION_OPTIONS[0] else show_callback
    with typer.Context(program, info_name="mtp-export") as context:
        try:
            run(context, program.params[0], given[0] if given else True)
        except typer.Exit:  # Typer has named the current shell
            raise _no_completion(option, "the current one", None) from None


def _no_completion(option: str, shell: str, todo: str | None) -> UsageError:
    return UsageError(
        f"Option {option} takes a shell that has completion",
        expected=", ".join(names_of(Names.SHELL)),
        found=shell,
        todo=todo,
    )
