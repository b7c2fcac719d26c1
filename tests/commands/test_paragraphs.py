"""Paragraphs on a terminal: no line is wider, and those after the first are indented."""

from __future__ import annotations

import io
import shlex

import pytest
from rich.console import Console
from rich.text import Text

from mtp_export.paragraphs import command_lines, lines_of

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


COMMAND = (
    r"""X=1 vllm serve 'a b/main' --config '{"k": 3}' --tp 2 --flag "it's" \$HOME && wait & true"""
)


@pytest.mark.parametrize(
    ("width", "label", "lines"),
    [
        (99, "", [COMMAND]),
        (30, "", ["X=1 vllm serve 'a b/main' \\", "  --config '{\"k\": 3}' --tp 2 \\"]),
        (29, "", ["X=1 vllm serve 'a b/main' \\", "  --config '{\"k\": 3}' \\"]),
        (38, "Try it:    ", ["Try it:    X=1 vllm serve 'a b/main' \\"]),
        (37, "Try it:    ", ["Try it:    X=1 vllm serve \\", " " * 13 + "'a b/main' \\"]),
        (9, "Try it:    ", ["Try it:    X=1 \\", "     vllm \\", "     serve \\"]),
    ],
)
def test_a_command_is_broken_as_a_shell_takes_it(width: int, label: str, lines: list[str]) -> None:
    found = list(command_lines(COMMAND, width, label))
    assert found[: len(lines)] == lines
    whole = "\n".join(found).removeprefix(label)
    assert shlex.split(whole.replace("\\\n", " ")) == shlex.split(COMMAND)
    ends = [line.endswith(" \\") for line in found]
    assert all(ends[:-1]) and not ends[-1]


def test_a_command_is_indented_where_it_has_no_label() -> None:
    assert list(command_lines("push bundle ORG/NAME --report r.json", 30)) == [
        "  push bundle ORG/NAME \\",
        "    --report r.json",
    ]
    assert list(command_lines("push --report r.json", 20)) == [
        "  push --report \\",
        "    r.json",
    ]
