"""A training on several ranks, one of which sees another bundle at the same path."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from cases import read_shard, shard_of
from forked import Forked, Pipe, environment_of, program
from runtime.ranks import launch_variables

NORM = "model.layers.0.input_layernorm.weight"


def change_weight(folder: Path, name: str) -> None:
    """Other bytes of one tensor, behind the same header."""
    shard = shard_of(folder, name)
    (header, data), raw = read_shard(shard), shard.read_bytes()
    start, stop = (len(raw) - len(data) + offset for offset in header[name]["data_offsets"])
    shard.write_bytes(raw[:start] + raw[start:stop][::-1] + raw[stop:])
    assert shard.read_bytes() != raw


@pytest.mark.timeout(300)
def test_ranks_that_see_other_files_train_nothing(
    bundle: Path, prompts: Path, tmp_path: Path
) -> None:
    """As on a machine with a stale copy."""
    for machine in ("first", "other"):
        shutil.copytree(bundle, tmp_path / machine / "bundle")
    change_weight(tmp_path / "other/bundle/main", NORM)
    words = ["tune", "--bundle", "bundle", "--data", prompts]
    words += ["--output-dir", "tuned", "--steps", "1", "--k", "1", "--max-new-tokens", "2"]
    environment, pipes = environment_of(launch_variables(2)), [Pipe(), Pipe()]
    processes = [
        Forked(
            program,
            *words,
            streams=(0, 1, pipe),
            environment=environment | {"RANK": str(rank)},
            folder=tmp_path / machine,
        )
        for rank, (machine, pipe) in enumerate(zip(("first", "other"), pipes, strict=True))
    ]
    errors = [pipe.read() for pipe in pipes]
    assert [process.wait() for process in processes] == [3, 3], errors
    shard = f"bundle/main/{shard_of(bundle / 'main', NORM).name}"
    for error, found in zip(errors, ("another rank", "this rank"), strict=True):
        assert "The processes of this run see different files" in error
        assert shard in error and f"other bytes on {found}" in error
    assert not list(tmp_path.glob("*/tuned*"))
