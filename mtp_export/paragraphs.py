"""Paragraphs that fit a terminal, as every page of the program has them."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

INDENT = 2


def lines_of(text: Text, console: Console, width: int, indent: int = INDENT) -> Iterator[Text]:
    """Yield the lines of a paragraph, none wider than a number of columns: it is broken between
    words, within those that are wider, and indented below its first line."""
    if text.cell_len <= width:
        yield text
        return
    margin = " " * min(indent, width // 3)
    for number, line in enumerate(text.wrap(console, max(1, width - len(margin)), overflow="fold")):
        line.rstrip()
        yield Text(margin if number else "") + line
