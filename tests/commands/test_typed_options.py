"""Options of all commands are fields of dataclasses, and their values are read as Typer reads
them."""

from __future__ import annotations

from typing import Any, cast

import pytest
import typer

from mtp_checkpoints.errors import MtpExportError
from mtp_export.commands.names import COMMANDS
from mtp_export.commands.registry import command_named, program
from mtp_export.commands.typed_command import QuickReading
from mtp_export.commands.typed_option import UNUSUAL
from mtp_export.options import METADATA

ALL_COMMANDS = {"help", "install_completion", "show_completion"}  # Typer's own options
GIVEN = (
    *("0", "1", "64", "65", "-1", "007", "1_0", " 3", "3.", ".5", "0.5", "1e3", "nan", "inf"),
    *("true", "", "auto", "AUTO", "hardlink", "all", "bf16", "int8", "hf", "xllm", "é", "cpu"),
    *("5GB", "4GiB", "1/8", "slurm", "1,2,3", "hf://org/name", "~", ".", "\0", "files", "none"),
)


def command_of(name: str) -> Any:
    return command_named(name) if name else program()


def parameters_of(name: str) -> list[Any]:
    command = command_of(name)
    found = command.get_params(typer.Context(command))
    return [parameter for parameter in found if parameter.name not in ALL_COMMANDS]


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_every_option_is_a_typed_field(name: str) -> None:
    leaves = cast(QuickReading, command_of(name)).leaves
    assert [parameter.name for parameter in parameters_of(name)] == list(leaves)
    for leaf in leaves.values():
        assert leaf.field.metadata[METADATA] is leaf.option
        assert leaf.hint is not Any and "Any" not in str(leaf.hint), leaf.path
        if leaf.option.default is not None:
            assert leaf.option.parser is not None
            assert leaf.option.parser(leaf.option.default) == leaf.field.default, leaf.path


def outcome(parameter: Any, value: object, command: Any) -> tuple[str, object]:
    """A value as Typer reads it, with its type, or its refusal."""
    try:
        found = parameter.process_value(typer.Context(command), value)
    except (MtpExportError, typer.TyperException) as error:
        return type(error).__name__, str(error)
    return type(found).__name__, repr(found)


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_every_value_is_read_as_typer_reads_it(name: str) -> None:
    command = command_of(name)
    for parameter in parameters_of(name):
        leaf = command.leaves[parameter.name]
        flags = (True,) if parameter.param_type_name == "option" and parameter.is_flag else ()
        known = (*leaf.choices, *(parameter.type_descriptor.choices or ()))
        read = 0
        for value in flags or (*GIVEN, *map(str, known)):
            given = [value, "a"] if parameter.multiple else value
            try:
                usual = leaf.usual(given)
            except MtpExportError as error:
                usual = error
            if usual is not UNUSUAL:
                read += 1
                shown = str(usual) if isinstance(usual, MtpExportError) else repr(usual)
                assert (type(usual).__name__, shown) == outcome(parameter, given, command)
        assert read, f"{leaf.path}: every value is left to Typer"
