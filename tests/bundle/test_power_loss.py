"""Power cuts at random moments: what was not synced is gone, nothing that is left looks whole, and
the same command ends with the same bytes as one that was never interrupted."""

from __future__ import annotations

import os
import random
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from bundle.commands import COMMANDS, Command, Files, check_nothing_looks_whole, finish
from cases import nightly_but, run_in_a_fork, tree
from disk import Platter, Survival, watch_disk, watched_disk
from mtp_checkpoints.sources.direct_io import PAGE_BYTES
from mtp_checkpoints.tensors import writer

pytestmark = pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded:DeprecationWarning"
)

# Nothing; names without content, as journaling file systems have it; a mixture; content in part.
SURVIVALS = (Survival(0, 0), Survival(1, 0), Survival(0.5, 0.5), Survival(1, 0.5))
EVERY_PUSH = [("export, linked", 61), ("export over another", 62)]
SEEDS = range(61, 81)
CUTS_PER_SEED = 4


def disk_calls(command: Command, source: Path, output: Path) -> int:
    """Disk calls of an uninterrupted run."""
    calls = Counter[str]()
    command.prepare(source, output)
    with watched_disk(lambda call, _: calls.update([call])):
        assert command.run(source, output).code == 0
    return calls.total()


def cut_at(
    call_number: int,
    command: Command,
    source: Path,
    output: Path,
    ignored: str = "",
) -> Platter:
    """The disk of a run whose power is cut at the n-th disk call. Folders, or files whose name ends
    like `ignored`, are never synced."""
    platter = Platter(output.parent.with_name(f"{output.parent.name}-kept"), output.parent, source)

    def watcher(call: str, arguments: tuple[Any, ...]) -> None:
        skipped = call == "fsync" and ignored and _name(arguments[0]).endswith(ignored)
        if not skipped:
            platter(call, arguments)

    def action() -> Any:
        watch_disk(watcher)
        return command.run(source, output)

    run_in_a_fork(action, call_number)
    return platter


def _name(fd: int) -> str:
    return os.readlink(f"/proc/self/fd/{fd}")


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of these small tensors too, some are written directly and in several parts."""
    monkeypatch.setattr(writer, "MIN_DIRECT_BYTES", 2 * PAGE_BYTES)
    monkeypatch.setattr(writer, "SMALL_BYTES", 0)
    monkeypatch.setattr(writer, "WRITE_BUFFER_BYTES", 2 * PAGE_BYTES)


@pytest.mark.parametrize(("name", "seed"), nightly_but(EVERY_PUSH, product(COMMANDS, SEEDS)))
def test_power_is_cut(
    name: str, seed: int, many: Path, tmp_path: Path, wholes: dict[str, Files]
) -> None:
    print(f"seed {seed}")
    chance, command, whole = random.Random(seed), COMMANDS[name], wholes[name]
    calls = disk_calls(command, many, tmp_path / "counted")
    for number in range(CUTS_PER_SEED):
        output = tmp_path / f"cut-{number}" / "output"
        output.parent.mkdir()
        before = command.prepare(many, output)
        platter = cut_at(chance.randrange(1, calls), command, many, output)
        platter.cut_power(output.parent, SURVIVALS[number % len(SURVIVALS)], chance)
        platter.close()
        check_nothing_looks_whole(output, [f for f in (before, whole) if f is not None])
        finish(command, many, output, whole)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_run_that_ended_survives(
    name: str, many: Path, tmp_path: Path, wholes: dict[str, Files]
) -> None:
    """Not even the folders' names are lost after exit code 0."""
    output = tmp_path / "cut" / "output"
    output.parent.mkdir()
    COMMANDS[name].prepare(many, output)
    platter = cut_at(1 << 30, COMMANDS[name], many, output)
    platter.cut_power(output.parent, Survival(0, 0), random.Random(0))
    platter.close()
    assert tree(output) == wholes[name]


@pytest.mark.parametrize("ignored", [".safetensors.tmp", ".json.tmp", "/output", "/main"])
def test_a_missing_sync_is_noticed(
    ignored: str, many: Path, tmp_path: Path, wholes: dict[str, Files]
) -> None:
    """Without one kind of fsync a bundle that a run has ended does not survive."""
    output = tmp_path / "cut" / "output"
    output.parent.mkdir()
    platter = cut_at(1 << 30, COMMANDS["export"], many, output, ignored=ignored)
    platter.cut_power(
        output.parent, Survival(1, 0) if "tmp" in ignored else Survival(0, 0), random.Random(0)
    )
    platter.close()
    assert (tree(output) if output.exists() else {}) != wholes["export"]


def test_every_byte_is_seen(many: Path, output: Path) -> None:
    """All bytes of a bundle are written by os.pwrite, where faults can be put."""
    seen = Counter[int]()

    def watcher(call: str, arguments: tuple[Any, ...]) -> None:
        if call == "pwrite":
            seen[os.fstat(arguments[0]).st_ino] += len(arguments[1])

    with watched_disk(watcher):
        assert COMMANDS["export"].run(many, output).code == 0
    files = [path for path in output.rglob("*") if path.is_file()]
    assert {path: seen[path.stat().st_ino] for path in files} == {
        path: path.stat().st_size for path in files
    }
