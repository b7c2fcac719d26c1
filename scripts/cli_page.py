"""Write the parts of docs/cli.md that follow from the commands: their list, and tables of options.

    python scripts/cli_page.py

A part stands between two comments: `<!-- commands -->` or `<!-- options: COMMAND -->` and
`<!-- end -->`; `<!-- options: COMMAND without OTHER -->` leaves out what the other command has too.
The rest of the page is written by hand. tests/commands/test_cli_page.py holds the page to it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from mtp_export.commands.names import COMMANDS
from mtp_export.commands.registry import command_named
from mtp_export.commands.typed_command import QuickReading
from mtp_export.commands.typed_option import Leaf

PAGE = Path(__file__).resolve().parents[1] / "docs/cli.md"
_PART = re.compile(r"(?<=^<!-- )(commands|options: .+?)( -->\n).*?(?=^<!-- end -->$)", re.M | re.S)
_HEAD = "| option | default | meaning |\n|---|---|---|"


def page_of(text: str) -> str:
    """Return a page with its generated parts made anew (ValueError for a command without one)."""
    named = {words.split()[1] for words, _ in _PART.findall(text) if words != "commands"}
    if missing := COMMANDS.keys() - named:
        raise ValueError(f"no table of options for {', '.join(sorted(missing))}")
    return _PART.sub(lambda part: f"{part[1]}{part[2]}{_made(part[1])}\n", text)


def _made(words: str) -> str:
    if words == "commands":
        width = max(map(len, COMMANDS))
        lines = (f"mtp-export {name:{width}}  {what}" for name, what in COMMANDS.items())
        return "\n".join(["```", *lines, "```"])
    command, _, other = words.removeprefix("options: ").partition(" without ")
    known = {leaf.flag for leaf in _leaves_of(other)} if other else set()
    return "\n".join(
        [_HEAD, *(_row(leaf) for leaf in _leaves_of(command) if leaf.flag not in known)]
    )


def _leaves_of(command: str) -> Iterator[Leaf]:
    """Yield the options of a command in the order of its help; arguments are in its usage line."""
    leaves = cast(QuickReading, command_named(command)).leaves.values()
    return (leaf for leaf in leaves if not leaf.option.is_argument)


def _row(leaf: Leaf) -> str:
    metavar = "" if leaf.is_switch else f" {leaf.option.shown_metavar}"
    names = ", ".join(f"`{name}`" for name in (f"{leaf.flag}{metavar}", leaf.option.short) if name)
    words = leaf.help.replace("\\[", "[").replace("|", "\\|")
    return f"| {names} | {_default(leaf)} | {words} |"


def _default(leaf: Leaf) -> str:
    """Return the default as the command line would write it; nothing for a switch that is off."""
    shown, value = leaf.option.show_default, leaf.option.default or leaf.field.default
    if isinstance(shown, str):
        return shown
    return "" if leaf.is_switch or leaf.is_required or value is None else f"`{value}`"


if __name__ == "__main__":
    PAGE.write_text(page_of(PAGE.read_text()))
