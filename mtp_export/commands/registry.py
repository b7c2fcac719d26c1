"""The program: one of its commands, or an export without one, each imported when it is asked for,
so that no run waits for those of others."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Any

from typer.core import TyperCommand

from mtp_export.commands.help_page import epilog_of, print_help
from mtp_export.commands.names import COMMANDS
from mtp_export.commands.typed_command import QuickGroup, typed_command, typed_group

# Those that, as an export does, go on where Ctrl-C stopped them when they run again.
RESUMED = ("export", "quantize", "graft", "tune", "finish", "push")
_KEEPS = ("--stream", "--share")  # options of a verification that keep what it found


def after_interrupt(arguments: Sequence[str]) -> str | None:
    """Return the words that follow those of Ctrl-C: how to go on, or that nothing is kept; None
    where there is nothing to say, as of a dry run."""
    if goes_on(arguments):
        again = [argument for argument in arguments if argument != "--no-resume"]
        return f"To go on:\n  {shlex.join(['mtp-export', *again])}"
    if _command_of(arguments) == "verify":
        return "Nothing is kept (--stream --workdir DIR keeps progress)."
    return None


def goes_on(arguments: Sequence[str]) -> bool:
    """True for a command that goes on where it stopped when it runs again."""
    options, command = _options_of(arguments), _command_of(arguments)
    if "--dry-run" in options:
        return False
    if command == "verify":
        return "--workdir" in options and not options.isdisjoint(_KEEPS)
    return command in RESUMED or (command == "" and "--output-dir" in options)


def _options_of(arguments: Sequence[str]) -> set[str]:
    return {argument.partition("=")[0] for argument in arguments}


def _command_of(arguments: Sequence[str]) -> str:
    """Return the name of a command, "" for an export without one."""
    first = next(iter(arguments), "")
    return first if first in COMMANDS else ""


@cache
def command_named(name: str) -> TyperCommand:
    """Return one of COMMANDS, as Typer runs it."""
    run = getattr(import_module(f"mtp_export.commands.{name}"), name)
    return typed_command(run, COMMANDS[name], epilog_of(name))


@cache
def program() -> QuickGroup:
    """Return the export, with COMMANDS behind it."""
    from mtp_export.commands.export import without_command  # half of the start of an inspect

    return typed_group(without_command, _Group)


class _Commands(Mapping[str, TyperCommand]):
    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)

    def __getitem__(self, name: str) -> TyperCommand:
        if name not in COMMANDS:
            raise KeyError(name)
        return command_named(name)


class _Group(QuickGroup):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = _Commands()  # type: ignore[assignment]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the commands, examples and the options without a command; those of an export are
        in its own help."""
        print_help()
