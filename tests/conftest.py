"""Fixtures for all tests."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from cases import make_checkpoint


def pytest_addoption(parser: pytest.Parser) -> None:
    """Take the seed and the length of tests/fuzz."""
    group = parser.getgroup("fuzz", "mutated inputs (tests/fuzz)")
    group.addoption("--fuzz-seed", type=int, default=0, help="seed of the first input")
    group.addoption(
        "--fuzz-seconds", type=float, default=15.0, help="length of each lane; 0: one input"
    )


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny fp8 checkpoint with ragged tiles; not to be changed."""
    return make_checkpoint(tmp_path_factory.mktemp("pristine") / "source")


@pytest.fixture
def source(pristine: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(pristine, tmp_path / "source"))


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """A folder that does not exist yet."""
    return tmp_path / "output"
