"""Commands by name, each imported when it is asked for: no run waits for those of others."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import typer

from mtp_export.commands.values import read_usual_values

# Each is a function of the module of its name; help lists them in this order.
COMMANDS = (
    *("quantize", "graft", "tune", "finish", "verify"),
    *("generate", "serve", "compile", "launch", "inspect", "push"),
)
SETTINGS: dict[str, Any] = {"rich_markup_mode": "rich", "pretty_exceptions_enable": False}


@cache
def command_named(name: str) -> Any:
    """Return one of COMMANDS, as Typer runs it."""
    own = typer.Typer(add_completion=False, **SETTINGS)
    own.command()(getattr(import_module(f"mtp_export.commands.{name}"), name))
    return read_usual_values(typer.main.get_command(own))
