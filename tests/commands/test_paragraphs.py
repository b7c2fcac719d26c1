"""Paragraphs on a terminal: no line is wider, and those after the first are indented."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.text import Text

from mtp_export.paragraphs import lines_of

CONSOLE = Console(file=io.StringIO())


@pytest.mark.parametrize(
    ("words", "width", "indent", "lines"),
    [
        ("one two three", 13, 2, ["one two three"]),
        ("one two three", 12, 2, ["one two", "  three"]),
        ("one two three", 12, 4, ["one two", "    three"]),
        ("one two three", 12, 0, ["one two", "three"]),
        ("longest of words", 6, 9, ["long", "  est", "  of", "  word", "  s"]),
        ("", 9, 2, [""]),
    ],
)
def test_lines_fit_and_are_indented(words: str, width: int, indent: int, lines: list[str]) -> None:
    found = list(lines_of(Text(words), CONSOLE, width, indent))
    assert [line.plain for line in found] == lines


def test_styles_stay() -> None:
    text = Text.assemble("one ", ("two three", "red"))
    first, second = lines_of(text, CONSOLE, 9)
    assert [first.plain[span.start : span.end] for span in first.spans] == ["two"]
    assert [second.plain[span.start : span.end] for span in second.spans] == ["three"]
