"""Paragraphs and commands that fit a terminal, as every page of the program has them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

INDENT = 2
# A word of a command, with its quotes.
_WORD = re.compile(r"""(?:'[^']*'|"(?:\\.|[^"\\])*"|\\.|[^\s'"\\])+""", re.DOTALL)
_FLAG = re.compile("--[a-z-]+")


def lines_of(text: Text, console: Console, width: int, indent: int = INDENT) -> Iterator[Text]:
    """Yield the lines of a paragraph, none wider than a number of columns: it is broken between
    words, within those that are wider, and indented below its first line."""
    from rich.text import Text  # errors, which may need commands alone, are printed without it

    if text.cell_len <= width:
        yield text
        return
    margin = " " * min(indent, width // 3)
    for number, line in enumerate(text.wrap(console, max(1, width - len(margin)), overflow="fold")):
        line.rstrip()
        yield Text(margin if number else "") + line


def command_lines(command: str, width: int, label: str = "  ") -> Iterator[str]:
    """Yield the lines of a command behind a label, broken between its words as a shell takes them;
    none is wider than a number of columns, but for a word that is. A flag and its value stay
    together where a line has room for both."""
    from rich.cells import cell_len

    margin = " " * (min(len(label), width // 3) + INDENT)
    words: list[str] = []
    for word in _WORD.findall(command):
        is_value = words and not word.startswith("--") and _FLAG.fullmatch(words[-1])
        if is_value and cell_len(f"{margin}{words[-1]} {word} \\") <= width:
            words[-1] += f" {word}"
        else:
            words.append(word)
    line, is_empty = label, True
    for number, word in enumerate(words):
        room = width - (2 if number < len(words) - 1 else 0)
        gap = "" if is_empty else " "
        if not is_empty and cell_len(f"{line}{gap}{word}") > room:
            yield f"{line} \\"
            line, gap = margin, ""
        line, is_empty = f"{line}{gap}{word}", False
    yield line
