"""A checkpoint of many shards, and whole bundles of the commands that tests interrupt."""

from __future__ import annotations

from pathlib import Path

import pytest

from bundle.commands import COMMANDS, Files
from cases import make_checkpoint, tree


@pytest.fixture(scope="session")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint in so many shards that there is much to interrupt."""
    return make_checkpoint(tmp_path_factory.mktemp("many") / "source", max_shard_bytes=60_000)


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
