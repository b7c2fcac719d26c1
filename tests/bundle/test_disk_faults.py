"""Faults of the disk: any write, fsync, rename or link may fail with any error. The run ends with a
sentence and the documented exit code, and the same command goes on to the same bytes."""

from __future__ import annotations

import errno
import os
import random
from collections import Counter
from pathlib import Path

import pytest

from bundle.commands import COMMANDS, Command, Files, check_nothing_looks_whole, finish
from cases import Outcome, looks_finished, nightly_but
from disk import Fault, watched_disk

ERRORS = ("ENOSPC", "EIO", "EDQUOT", "EROFS")
CALLS = {"write": "pwrite", "fsync": "fsync", "rename": "replace", "link": "link"}
EVERY_PUSH = [("write", "ENOSPC", 3), ("fsync", "EIO", 3), ("rename", "EDQUOT", 3)]
SEED, FEW, MANY = 15, 3, 50


def calls_of(command: Command, source: Path, output: Path) -> Counter[str]:
    """Return the number of each call that an undisturbed run makes."""
    calls = Counter[str]()
    with watched_disk(lambda call, _: calls.update([call])):
        assert command.run(source, output).code == 0
    return calls


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
    kind: str, error: str, numbers: int, many: Path, tmp_path: Path, wholes: dict[str, Files]
) -> None:
    print(f"seed {SEED}")
    chance = random.Random(f"{SEED} {kind} {error}")
    counts = {n: calls_of(c, many, tmp_path / f"of {n}")[CALLS[kind]] for n, c in COMMANDS.items()}
    names = [name for name, count in counts.items() if count >= MANY]
    for number in chance.sample(range(1, min(counts[name] for name in names) + 1), numbers):
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
