"""Fixtures for all tests."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from cases import make_checkpoint


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
