"""Faults of the disk: any write, fsync, rename or link may fail with any error. The run ends with a
sentence and the documented exit code, and the same command goes on to the same bytes."""

from __future__ import annotations

import errno
import os
import random
from collections import Counter
from pathlib import Path

import pytest

from bundle.commands import COMMANDS, Files, check_nothing_looks_whole, finish
from cases import Outcome, looks_finished, nightly_but
from disk import Fault, watched_disk

ERRORS = ("ENOSPC", "EIO", "EDQUOT", "EROFS")
CALLS = {"write": "pwrite", "fsync": "fsync", "rename": "replace", "link": "link"}
EVERY_PUSH = [("write", "ENOSPC", 3), ("fsync", "EIO", 3), ("rename", "EDQUOT", 3)]
SEED, FEW, MANY = 15, 3, 50


@pytest.fixture(scope="module")
def counts(many: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Counter[str]]:
    """Return the number of each call that an undisturbed run of each command makes."""
    counts = {name: Counter[str]() for name in COMMANDS}
    for name, command in COMMANDS.items():
        with watched_disk(lambda call, _, name=name: counts[name].update([call])):
            assert command.run(many, tmp_path_factory.mktemp("counted") / "output").code == 0
    return counts


def check_refusal(outcome: Outcome, error: int) -> None:
    """One sentence, the exit code of the disk, and what the system said."""
    assert outcome.code in (5, 6), outcome.err
    assert outcome.err.startswith("mtp-export: error: ")
    assert outcome.err.count("\n") == 1
    assert os.strerror(error) in outcome.err


@pytest.mark.parametrize(
    ("kind", "error", "numbers"),
    nightly_but(
        [*EVERY_PUSH, ("link", "EROFS", FEW)],
        [(kind, error, n) for kind in CALLS for error in ERRORS for n in (FEW, MANY)],
    ),
)
def test_a_call_fails(
    kind: str,
    error: str,
    numbers: int,
    many: Path,
    tmp_path: Path,
    wholes: dict[str, Files],
    counts: dict[str, Counter[str]],
) -> None:
    print(f"seed {SEED}")
    chance = random.Random(f"{SEED} {kind} {error}")
    names = [name for name, calls in counts.items() if calls[CALLS[kind]] >= MANY]
    least = min(counts[name][CALLS[kind]] for name in names)
    for number in chance.sample(range(1, least + 1), numbers):
        name = chance.choice(names)
        command, output = COMMANDS[name], tmp_path / f"{name}-{number}"
        before = command.prepare(many, output)
        fault = Fault(CALLS[kind], number, getattr(errno, error), lasts=chance.random() < 0.5)
        with watched_disk(fault):
            outcome = command.run(many, output)
        assert fault.met
        check_nothing_looks_whole(output, [f for f in (before, wholes[name]) if f is not None])
        if outcome.code == 0:  # the last fsync, after a journal's removal
            assert looks_finished(output)
        else:
            check_refusal(outcome, fault.error)
        finish(command, many, output, wholes[name])
