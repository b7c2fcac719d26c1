"""CONTRIBUTING.md is true: every kind is in its table, every registry where it says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from pages import ROOT, code_in, rows_of, sections_of

PAGE = ROOT / "CONTRIBUTING.md"
ROWS = rows_of(sections_of(PAGE)["One file, one line"])
# The registry of each kind; None for what needs no line in one.
REGISTRIES = {
    "a model family of known parts": "FAMILIES",
    "an attention layer": "LAYERS",
    "a target layout": "TARGETS",
    "a target engine that reads a known layout": None,
    "a precision scheme on known storages": "SCHEMES",
    "a weight format on disk": "FORMATS",
    "a `quant_method`": "METHODS",
    "a tensor transform": None,
    "a quantization kernel backend": "BACKENDS",
    "a backend of weight statistics": "BACKENDS",
    "an attention backend": "BACKENDS",
    "a backend of gated delta nets": "BACKENDS",
    "a backend of products with stored weights": "BACKENDS",
    "a decoder backend": "BACKENDS",
    "a draft that `tune` trains": "DRAFTS",
    "a drafter": "DRAFTERS",
    "an acceptance rule": "ACCEPTANCE_RULES",
    "a check of `verify`": "CHECKS",
    "a planted fault": None,
    "a mutator of inputs": "MUTATORS",
    "a byte source": "SOURCES",
    "a container": "CONTAINERS",
    "an architecture of GGUF": "ARCHITECTURES",
}


def kind_of(row: list[str]) -> str:
    """Return what a row says how to add, without its explanation."""
    return re.split(r"[:,]", row[0])[0]


def folder_of(row: list[str]) -> Path:
    """Return the folder of the new file, in which the registry is."""
    (place, *_) = [code for code in code_in(row[1]) if "/" in code]
    return ROOT / place.rpartition("/")[0]


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
    assert [kind_of(row) for row in ROWS] == list(REGISTRIES)


@pytest.mark.parametrize("row", ROWS, ids=kind_of)
def test_the_place_of_the_new_file_exists(row: list[str]) -> None:
    places = [code for code in code_in(row[1]) if "/" in code]
    assert places or row[1].startswith("none")
    for place in places:
        folder = re.split(r"/[^/]*[<*]", place)[0]
        assert (ROOT / folder).exists(), place


@pytest.mark.parametrize("row", ROWS, ids=kind_of)
def test_the_line_goes_where_the_table_says(row: list[str]) -> None:
    registry = REGISTRIES[kind_of(row)]
    assert registry is None or row[2].startswith(f"`{registry}` in ")
    named = re.findall(r"`(\w+)` (?:in|of) (?:the folder's )?`([\w./]+\.py)`", f"{row[1]} {row[2]}")
    assert registry is None or named
    for name, file in named:
        path = ROOT / file if "/" in file else folder_of(row) / file
        assert name in names_at_the_top(path), f"{path} has no {name}"


def test_an_engine_has_the_fields_that_the_table_names() -> None:
    (row,) = [row for row in ROWS if kind_of(row).startswith("a target engine")]
    tree = ast.parse((ROOT / "checkpoints/mtp_checkpoints/layouts/base.py").read_text())
    (engine,) = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Engine"]
    fields = {ast.unparse(node.target) for node in engine.body if isinstance(node, ast.AnnAssign)}
    assert set(code_in(row[1])) - {"Engine"} <= fields
