"""Extras of pyproject.toml: torch-npu is pinned, and nowhere but in its own.

Where CANN's libraries are missing, `import torch` fails as soon as torch-npu is installed.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
CONSTRAINTS = sorted(ROOT.glob("constraints*.txt"))
NEVER = {"torch-npu", "mtp-export"}  # nor by way of the own extras


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


def test_the_npu_extra_is_one_version(project: dict[str, Any]) -> None:
    (npu,) = map(Requirement, project["optional-dependencies"]["npu"])
    (specifier,) = npu.specifier
    assert (npu.name, specifier.operator) == ("torch-npu", "==")
    assert "*" not in specifier.version


def test_no_other_extra_brings_it(project: dict[str, Any]) -> None:
    others = {name: own for name, own in project["optional-dependencies"].items() if name != "npu"}
    assert "dev" in others
    for name, own in (others | {"none": project["dependencies"]}).items():
        assert not NEVER & set(map(name_of, own)), name


@pytest.mark.parametrize("path", CONSTRAINTS, ids=lambda path: path.name)
def test_no_constraints_have_it(path: Path) -> None:
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    names = [name_of(line) for line in lines if line and not line.startswith("-")]
    assert names and not NEVER & set(names)


def name_of(requirement: str) -> str:
    return Requirement(requirement).name.lower().replace("_", "-")
