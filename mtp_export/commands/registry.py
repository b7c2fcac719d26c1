"""The program: an export, or one of its commands, each imported when it is asked for, so that no
run waits for those of others."""

from __future__ import annotations

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
# What Ctrl-C leaves of a command, or of an export (""); of the others there is nothing to say.
_GOES_ON = "it goes on where it stopped"
_AGAIN = f"Run the same command again: {_GOES_ON}"
_AFTER_INTERRUPT = dict.fromkeys(("", "quantize", "graft", "tune", "finish", "push"), _AGAIN) | {
    "verify": "Nothing is kept of a verification, except with --workdir by --stream or --share"
}


def after_interrupt(arguments: Sequence[str]) -> str | None:
    """Return what to do after Ctrl-C in a command; None where there is nothing, as in a dry run."""
    if "--dry-run" in arguments:
        return None
    first = next(iter(arguments), "")
    words = _AFTER_INTERRUPT.get(first if first in COMMANDS else "")
    if words == _AGAIN and "--no-resume" in arguments:
        return f"Run the same command without --no-resume: {_GOES_ON}"
    return words


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
