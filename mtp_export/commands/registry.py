"""The program: an export, or one of its commands, each imported when it is asked for, so that no
run waits for those of others."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Any

from typer.core import TyperCommand

from mtp_export.commands.typed_command import QuickGroup, typed_command, typed_group

# Each is a function of the module of its name; help lists them in this order.
COMMANDS = (
    *("quantize", "graft", "tune", "finish", "verify"),
    *("generate", "serve", "compile", "launch", "inspect", "push"),
)
# Those that, as an export does, go on where Ctrl-C stopped them when they run again.
RESUMED = ("quantize", "graft", "tune", "finish", "push")
_KEEPS = ("--stream", "--share")  # options of a verification that keep what it found


def after_interrupt(arguments: Sequence[str]) -> str | None:
    """Return the words that follow those of Ctrl-C: how to go on, or that nothing is kept; None
    where there is nothing to say, as of a dry run."""
    options = {argument.partition("=")[0] for argument in arguments}
    first = next(iter(arguments), "")
    command = first if first in COMMANDS else ""
    is_kept = "--workdir" in options and not options.isdisjoint(_KEEPS)
    is_export = command == "" and "--output-dir" in options
    if "--dry-run" in options or not (is_export or command in (*RESUMED, "verify")):
        return None
    if command == "verify" and not is_kept:
        return "Nothing is kept (--stream --workdir DIR keeps progress)."
    again = [argument for argument in arguments if argument != "--no-resume"]
    return f"To go on:\n  {shlex.join(['mtp-export', *again])}"


@cache
def command_named(name: str) -> TyperCommand:
    """Return one of COMMANDS, as Typer runs it."""
    return typed_command(getattr(import_module(f"mtp_export.commands.{name}"), name))


@cache
def program() -> QuickGroup:
    """Return the export, with COMMANDS behind it."""
    from mtp_export.commands.export import export  # half of the start of an inspect

    return typed_group(export, _Group)


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
