"""The program as a whole: an export, or one of its commands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import typer
from typer.core import TyperGroup

from mtp_export.commands.export import export
from mtp_export.commands.registry import COMMANDS, SETTINGS, command_named
from mtp_export.commands.values import read_usual_values


class _Commands(Mapping[str, Any]):
    """Commands by name, each imported when it is asked for."""

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)

    def __getitem__(self, name: str) -> Any:
        if name not in COMMANDS:
            raise KeyError(name)
        return command_named(name)


class _Group(TyperGroup):
    """The export's options, and the commands behind them."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = _Commands()  # type: ignore[assignment]


app = typer.Typer(cls=_Group, **SETTINGS)
app.callback(invoke_without_command=True)(export)
program = read_usual_values(typer.main.get_command(app))
