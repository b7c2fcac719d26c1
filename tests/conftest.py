"""Fixtures for all tests."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

import forked
from cases import export, make_checkpoint, quantize
from quantize_rows import CONFIGS, ROWS

MINIATURE = Path(__file__).resolve().parents[1] / "fixtures/deepseek-v3-tiny"

# For torch, which nothing has imported yet: products this small lose time to a second thread, and
# more where each worker has but one core, since threads wait for each other busily.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Take the seed and the length of tests/fuzz, and the wish to test a GPU."""
    group = parser.getgroup("fuzz", "mutated inputs (tests/fuzz)")
    group.addoption("--fuzz-seed", type=int, default=0, help="seed of the first input")
    group.addoption(
        "--fuzz-seconds", type=float, default=8.0, help="length of each lane; 0: one input"
    )
    gpu = parser.getgroup("gpu", "tests marked cuda")
    gpu.addoption("--require-cuda", action="store_true", help="fail where there is no GPU")
    if importlib.util.find_spec("pytest_timeout") is None:
        parser.addini("timeout", "seconds of a test; pytest-timeout, which is not here, ends it")


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to start without the GPU that is asked for, and take Ctrl-C, which a shell's `&` has
    commands ignore, and the programs that tests start with them."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("markexpr") != "not nightly":
        forked.IMPORTED.extend(forked.IMPORTED_TO_TRAIN)
    if importlib.util.find_spec("pytest_timeout") is None:
        config.addinivalue_line("markers", "timeout(seconds): as above")
    if config.getoption("--require-cuda"):
        if reason := missing_gpu():
            raise pytest.UsageError(
                f"--require-cuda: expected a GPU to test on, found none: {reason}"
            )
        if importlib.util.find_spec("numba") is None:
            compute_without_numba()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip the tests of a GPU where there is none."""
    if item.get_closest_marker("cuda") and (reason := missing_gpu()):
        pytest.skip(reason)


def compute_without_numba() -> None:
    """Let what is compared with a GPU's results on the CPU be computed by the references there."""
    from mtp_kernels import quantize, stored_linear, weight_statistics

    for backends in (quantize.BACKENDS, weight_statistics.BACKENDS):
        backends["cpu"] = backends["reference"]
    stored_linear.AUTO["cpu"] = "reference"


@cache
def missing_gpu() -> str:
    """Return why no test can run on a GPU here; nothing where one can."""
    import torch

    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no CUDA device"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    return ""


@pytest.fixture(autouse=True, scope="session")
def no_disk_is_waited_for() -> Iterator[None]:
    """Sync nothing: what a power cut leaves is the subject of tests with a disk of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def no_two_workers_compile_the_same() -> None:
    """A worker waits for what another compiles, or a rank that one started."""
    if "PYTEST_XDIST_WORKER" in os.environ and importlib.util.find_spec("numba"):
        from compiled_once import compile_once

        compile_once()


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny fp8 checkpoint with ragged tiles; not to be changed."""
    return make_checkpoint(tmp_path_factory.mktemp("pristine") / "source")


@pytest.fixture(scope="session")
def row_sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny checkpoints of whole tiles by their precision; not to be changed."""
    return {
        kind: make_checkpoint(tmp_path_factory.mktemp(kind) / "source", config)
        for kind, config in CONFIGS.items()
    }


@pytest.fixture(scope="session")
def row_bundle(
    row_sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], Path]:
    """Bundles by their row of the precision table and the precision of their source, each made
    once; not to be changed."""

    @cache
    def bundle(row: str, kind: str) -> Path:
        folder = tmp_path_factory.mktemp("row") / "bundle"
        outcome = quantize(row_sources[kind], folder, *ROWS[row].options)
        assert outcome.code == 0, outcome.err
        return folder

    return bundle


@pytest.fixture(scope="session")
def trained_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good bundle of the trained miniature, whose files are its own; not to be changed."""
    folder = tmp_path_factory.mktemp("trained") / "bundle"
    assert export(MINIATURE, folder, "--link", "copy", "--quiet").code == 0
    return folder


@pytest.fixture
def without_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """No part of a main model is trained, which most of a small model's level run is: for tests
    that judge what else it does."""
    monkeypatch.setattr("mtp_export.verify.decoding.training.MOST_BYTES", 0)


@pytest.fixture
def source(pristine: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(pristine, tmp_path / "source"))


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """A folder that does not exist yet."""
    return tmp_path / "output"
