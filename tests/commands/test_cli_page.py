"""The page of the command line names every option that there is, and none that there is not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import cast

import pytest

from mtp_export.commands.registry import COMMANDS, command_named, program
from mtp_export.commands.typed_command import QuickReading

PAGE = (Path(__file__).resolve().parents[2] / "docs/cli.md").read_text()
SECTIONS = {
    title.split()[0].lower(): text
    for title, text in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S)
}
# Commands whose section refers to the options of another.
SHARED = {"quantize": "export", "graft": "export"}
OF_ALL = ("--debug", "--json", "--quiet", "--report")


def flags_of(command: str) -> set[str]:
    leaves = cast(QuickReading, command_named(command)).leaves.values()
    return {leaf.flag for leaf in leaves if leaf.flag.startswith("--")}


def section_of(command: str) -> str:
    return SECTIONS.get(command, "") + SECTIONS.get(SHARED.get(command, ""), "")


@pytest.mark.parametrize("command", [name for name in COMMANDS if name in SECTIONS])
def test_every_option_is_on_the_page(command: str) -> None:
    missing = {flag for flag in flags_of(command) if f"`{flag}" not in section_of(command)}
    assert missing <= set(OF_ALL) and all(flag in PAGE for flag in missing)


def test_every_option_of_a_table_is_there() -> None:
    known = {name for parameter in program().params for name in parameter.opts}
    known |= {flag for command in COMMANDS for flag in flags_of(command)}
    for row in re.findall(r"^\| (`--.+?) \|", PAGE, re.M):
        for flag in re.findall(r"`(--[a-z0-9-]+)", row):
            assert flag in known, f"{flag} of docs/cli.md"


@pytest.mark.parametrize("command", [name for name in COMMANDS if name in SECTIONS])
def test_every_choice_is_on_the_page(command: str) -> None:
    for leaf in cast(QuickReading, command_named(command)).leaves.values():
        rows = re.findall(rf"^\| `{leaf.flag}[ `].*$", section_of(command), re.M)
        named = [row for row in rows if "as for `" not in row]
        for choice in leaf.choices if named and "SCHEME" not in named[0] else ():
            assert re.search(rf"\b{re.escape(choice)}\b", PAGE), (leaf.flag, choice)
