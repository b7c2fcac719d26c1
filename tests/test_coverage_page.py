"""docs/coverage.md: every feature has a place or says "not yet", and what it names exists."""

from __future__ import annotations

import re

import pytest

from mtp_export.commands.registry import program
from pages import ROOT, code_in, paths_in, rows_of, sections_of

PAGE = ROOT / "docs/coverage.md"
DOCUMENTS = {name: rows_of(text) for name, text in sections_of(PAGE).items() if name[0].isdigit()}
ROWS = [row for rows in DOCUMENTS.values() for row in rows]


def known_options() -> set[str]:
    commands = [program(), *program().commands.values()]
    return {name for command in commands for parameter in command.params for name in parameter.opts}


def test_all_five_documents_are_there() -> None:
    assert [name[0] for name in DOCUMENTS] == list("12345")
    assert all(len(rows) >= 5 for rows in DOCUMENTS.values())


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_row(row: list[str]) -> None:
    feature, here, test = row
    assert feature and here
    for path in paths_in(here):
        assert (ROOT / path).exists(), path
    for name in code_in(test):
        assert len(list((ROOT / "tests").rglob(f"{name}.py"))) == 1, name
    assert set(re.findall(r"--[a-z][a-z-]+", here)) <= known_options()
    if not here.startswith("not yet"):
        assert code_in(test) or test == "speed is never asserted", "a feature needs its test"
