"""Models to run: small random ones, and the trained fixture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.common.dequantized import write_dequantized
from mtp_runtime.models.model import Model
from runtime.checkpoints import SMALL, write_checkpoint
from runtime.harness import load

FIXTURE = Path(__file__).resolve().parents[2] / "fixtures/deepseek-v3-tiny"


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint of three layers and an MTP layer."""
    return write_checkpoint(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="session")
def variant(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes random checkpoints whose config differs from SMALL."""

    def write(seed: int = 0, **changes: object) -> Path:
        return write_checkpoint(tmp_path_factory.mktemp("variant"), SMALL | changes, seed)

    return write


@pytest.fixture(scope="session")
def trained() -> Path:
    """The trained fixture, in its fp8 form."""
    assert FIXTURE.is_dir(), f"{FIXTURE} is part of the repository"
    return FIXTURE


@pytest.fixture(scope="session")
def trained_glm() -> Path:
    """A trained fixture of three layers, for all who load one often."""
    return FIXTURE.parent / "glm4-moe-tiny"


@pytest.fixture(scope="session")
def trained_model(trained: Path) -> Model:
    """It on compiled kernels, for all who only run it."""
    return load(trained)


@pytest.fixture(scope="session")
def trained_dense(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained fixture dequantized to float32, as transformers can load it."""
    return write_dequantized(trained, tmp_path_factory.mktemp("dense"))
