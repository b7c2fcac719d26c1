"""A checkpoint of many shards, bundles of the commands that tests interrupt, and an unfinished
one."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from bundle.commands import COMMANDS, UNFINISHED, Files
from cases import export, make_checkpoint, tree
from mtp_export.bundle import owner
from quantized_by_others import write
from remote_bundles import COPIES


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not watch for long whether an owner lives whose claim a kill or a power cut damaged."""
    monkeypatch.setattr(owner, "PATIENCE_SECONDS", 0.2)


@pytest.fixture(scope="session")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint in so many shards that there is much to interrupt."""
    return make_checkpoint(tmp_path_factory.mktemp("many") / "source", max_shard_bytes=40_000)


@pytest.fixture(scope="session")
def wholes(many: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Files]:
    """The bundle of an uninterrupted run of each command."""
    result = {}
    for name, command in COMMANDS.items():
        output = tmp_path_factory.mktemp("whole") / "output"
        outcome = command.run(many, output)
        assert outcome.code == 0, outcome.err
        result[name] = tree(output)
    return result


@pytest.fixture(scope="session")
def local(pristine: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The MTP bundle of the tiny checkpoint's folder, to which those of remote ones are equal."""
    output = tmp_path_factory.mktemp("local") / "output"
    assert export(pristine, output, *COPIES).code == 0
    return tree(output)


@pytest.fixture
def unfinished(source: Path, output: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An output that a failing disk left unfinished after its third shard."""
    with monkeypatch.context() as patch:
        real, calls = os.posix_fallocate, [0]

        def fail(*arguments: int) -> None:
            calls[0] += 1
            if calls[0] > 3:
                raise OSError(5, "Input/output error")
            real(*arguments)

        patch.setattr(os, "posix_fallocate", fail)
        assert export(source, output, *UNFINISHED, "--workers", "1").code == 6
    assert len(list(output.glob("*/model-*"))) == 3
    return output


@pytest.fixture(scope="module")
def mains(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Main models by the method that quantized them, of a module's original."""

    @cache
    def quantized(name: str) -> Path:
        folder = tmp_path_factory.mktemp("main") / "main"
        write(original, folder, name)
        return folder

    return quantized
