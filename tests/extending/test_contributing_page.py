"""CONTRIBUTING.md is true: every kind is in its table, every registry where it says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from pages import ROOT, code_in, rows_of, sections_of

PAGE = ROOT / "CONTRIBUTING.md"
ROWS = rows_of(sections_of(PAGE)["One file, one line"])
KINDS = {
    "a model family": "FAMILIES",
    "a model of the runtime": "MODELS",
    "an attention layer": None,
    "a target engine": "TARGETS",
    "a target engine that reads integers": "TARGETS",
    "a precision scheme on known storages": "SCHEMES",
    "a `quant_method` to be read": "READERS",
    "a tensor transform": None,
    "a quantization kernel backend": "BACKENDS",
    "an attention backend": "BACKENDS",
    "a decoder backend": "BACKENDS",
    "a drafter": "DRAFTERS",
    "an acceptance rule": "ACCEPTANCE_RULES",
    "a check of `verify`": "CHECKS",
    "a planted fault": None,
}


def kind_of(row: list[str]) -> str:
    return re.split(r"[:,]", row[0])[0]


def names_at_the_top(path: Path) -> set[str]:
    """Return the names that a module defines or assigns at its top level."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign):
            targets = [node.target]
        found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def test_every_kind_is_in_the_table() -> None:
    assert [kind_of(row) for row in ROWS] == list(KINDS)


@pytest.mark.parametrize("row", ROWS, ids=kind_of)
def test_the_folder_of_the_new_file_exists(row: list[str]) -> None:
    named = [code for code in code_in(row[1]) if "/" in code]
    if not named:
        assert row[1].startswith("the same file")
    for path in named:
        parts = re.split(r"/[^/]*[<*]", path)
        assert (ROOT / parts[0]).exists(), path


@pytest.mark.parametrize("row", ROWS, ids=kind_of)
def test_the_registry_is_where_the_table_says(row: list[str]) -> None:
    registry = KINDS[kind_of(row)]
    words = code_in(row[2])
    if registry is None:
        return
    assert words[0] == registry
    own = code_in(row[1])[0] if "the same file" in row[2] else words[1]
    assert registry in names_at_the_top(ROOT / own), f"{own} has no {registry}"


@pytest.mark.parametrize("row", ROWS, ids=kind_of)
def test_everything_else_that_is_named_exists(row: list[str]) -> None:
    for column in row[1:]:
        for name, path in re.findall(r"`(\w+)` (?:in|of) `([\w./]+)`", column):
            if (ROOT / path).is_file():
                assert name in names_at_the_top(ROOT / path), f"{path} has no {name}"
            else:
                assert path == "Target", path
    if "integer_options" in row[1]:
        assert "integer_options" in (ROOT / "mtp_export/targets/base.py").read_text()
