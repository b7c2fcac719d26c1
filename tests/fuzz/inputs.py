"""One mutated input: a subject, damage done to it, and a command that reads it."""

from __future__ import annotations

import os
import shutil
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from fuzz.cases import CASES
from fuzz.commands import COMMANDS
from fuzz.lab import Lab, copy_of
from fuzz.mutators import MUTATORS
from fuzz.sandbox import WATCH, Finding, Sandbox, check_no_secret, check_same, tree_of

Key = int | str  # a seed, or the name of one of the known cases
_MAX_MUTATED_BYTES = 20_000_000  # what a mutator before made huge is not read


@dataclass(frozen=True)
class Case:
    """An input and the command that reads it.

    damage takes the input's folder. random draws the command's options.
    """

    command: str
    subject: str
    damage: Callable[[Path], object]
    random: Random


@dataclass(frozen=True)
class Verdict:
    """Outcome of one case: what was run with which exit codes, and the finding if there is one."""

    key: Key
    command: str
    mutators: tuple[str, ...]
    codes: tuple[tuple[str, int], ...]
    seconds: float
    finding: Finding | None = None


def case_of(seed: int, damaged: list[str]) -> Case:
    """Return the case that a seed stands for; damaged becomes the list of its mutators."""
    random = Random(seed)
    weights = [command.weight for command in COMMANDS.values()]
    (name,) = random.choices(list(COMMANDS), weights)
    subject = random.choice(COMMANDS[name].subjects)
    count = random.choice((1, 1, 1, 2, 3))

    def damage(folder: Path) -> None:
        for _ in range(count):
            damaged.append(_mutate(folder, random))

    return Case(name, subject, damage, random)


def command_of(key: Key) -> str:
    """Return the command that a key's case runs."""
    return CASES[key].command if isinstance(key, str) else case_of(key, []).command


def _mutate(folder: Path, random: Random) -> str:
    """Damage one file of an input with one mutator; return what was done."""
    files = [path for path in sorted(folder.rglob("*")) if _can_be_mutated(path)]
    able = {name: [path for path in files if path.match(m.pattern)] for name, m in MUTATORS.items()}
    able = {name: found for name, found in able.items() if found}
    (name,) = random.choices(list(able), [MUTATORS[name].weight for name in able])
    path = random.choice(able[name])
    MUTATORS[name].mutate(path, random)
    return f"{name} {path.relative_to(folder)}"


def _can_be_mutated(path: Path) -> bool:
    return path.is_file() and not path.is_symlink() and path.stat().st_size < _MAX_MUTATED_BYTES


def judge(key: Key, lab: Lab, folder: Path) -> Verdict:
    """Make the input that a key stands for in a folder of its own, run it, and judge it."""
    damaged: list[str] = []
    if isinstance(key, int):
        return judge_case(case_of(key, damaged), key, lab, folder, damaged)
    known = CASES[key]
    case = Case(known.command, known.subject, known.damage, Random(0))
    verdict = judge_case(case, key, lab, folder, [key])
    if verdict.finding is None and verdict.codes[0][1] != known.exit:
        found = Finding("known case", key, f"exits {verdict.codes}, expected {known.exit}")
        return replace(verdict, finding=found)
    return verdict


def judge_case(case: Case, key: Key, lab: Lab, folder: Path, damaged: list[str]) -> Verdict:
    """Run one case in an empty folder, and judge what happened."""
    sandbox, finding, start = Sandbox(folder), None, time.monotonic()
    try:
        folder.mkdir(parents=True)
        copy_of(lab.input(case.subject), sandbox.input)
        case.damage(sandbox.input)
        start = time.monotonic()
        _run(case, sandbox, lab)
    except Finding as found:
        finding = found
    except Exception as error:  # an oracle that chokes on what the program accepted
        finding = Finding("oracle failed", repr(error)[:80], traceback.format_exc()[-4000:])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Verdict(
        key=key,
        command=case.command,
        mutators=tuple(damaged),
        codes=tuple(sandbox.codes),
        seconds=time.monotonic() - start,
        finding=finding,
    )


def _run(case: Case, sandbox: Sandbox, lab: Lab) -> None:
    command = COMMANDS[case.command]
    kept = [path for path in sandbox.input.iterdir() if path.name != command.writes]
    before = {path: tree_of(path) for path in kept}
    there = os.getcwd()
    os.chdir(sandbox.folder)
    try:
        command.run(sandbox, case.random, lab)
    finally:
        os.chdir(there)
    for path, tree in before.items():
        check_same(tree, tree_of(path), path.name)
    known = {"input", "output", "again", "reference"}
    strays = [path.name for path in sandbox.folder.iterdir() if path.name not in known]
    if any(not name.startswith("report.") for name in strays):
        raise Finding("outside", "beside the output", str(strays))
    if not sandbox.asks_servers:  # which publish what a link in their folder leads to
        check_no_secret(sandbox.output)
    WATCH.check_memory()
