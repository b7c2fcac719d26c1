"""Values of options and arguments: what is read without pydantic is what Typer reads with it."""

from __future__ import annotations

from typing import Any

import pytest
import typer

from mtp_checkpoints.errors import MtpExportError
from mtp_export.commands.group import program
from mtp_export.commands.registry import COMMANDS, command_named
from mtp_export.commands.values import UsualValues

GIVEN = (
    *(
        "0",
        "1",
        "64",
        "65",
        "-1",
        "007",
        "1_0",
        " 3",
        "3.",
        ".5",
        "0.5",
        "1e3",
        "nan",
        "inf",
        "true",
    ),
    *("", "auto", "AUTO", "hardlink", "all", "bf16", "int8", "hf", "xllm", "é", "cpu"),
    *("5GB", "4GiB", "1/8", "slurm", "1,2,3", "hf://org/name", "~", ".", "\0"),
)


def outcome(values: Any, value: object, parameter: Any) -> tuple[str, object]:
    """A value as it is read, with its type, or the words of the refusal."""
    context = typer.Context(program)
    try:
        found = values.coerce(value, param=parameter, ctx=context)
    except (MtpExportError, typer.TyperException) as error:
        return type(error).__name__, str(error)
    return type(found).__name__, repr(found)


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_every_value_is_read_as_typer_reads_it(name: str) -> None:
    command = command_named(name) if name else program
    for parameter in command.get_params(typer.Context(command)):
        typers = type(parameter).get_runtime_param(parameter)
        several = parameter.multiple
        for value in [*GIVEN, None, parameter.default]:
            given = (value, "a") if several and value is not None else value
            usual = outcome(UsualValues(parameter), given, parameter)
            assert usual == outcome(typers, given, parameter), (parameter.name, given)
