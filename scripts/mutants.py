"""Mutation testing: plant small faults one at a time, and see that the tests of the file fail.

    python scripts/mutants.py [--sample N] [--seed S] [--only PATH]

mutmut makes the mutants. Its own runner leaves out properties and all that is outside of functions,
such as defaults and tables, and takes a file's path for its module's name, which is wrong below
runtime/, checkpoints/ and kernels/. So they run here: in forks of a process that has torch and
numba loaded, each with the tests that mutants.toml gives to its file. No file is changed: a fork
imports its mutant in place of the file, so that tests do not see it in processes that they start.
Survivors that
docs/mutants.md lists are known; any other ends the run with exit code 1, as does a share of killed
ones below LEAST_KILLED.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import importlib
import json
import os
import random
import resource
import signal
import sys
import time
import tomllib
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType

import libcst as cst
from libcst.metadata import MetadataWrapper
from mutmut.mutation.file_mutation import MutationVisitor, deep_replace
from mutmut.mutation.mutators import mutation_operators
from mutmut.mutation.pragma_handling import IgnoredCode

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build/mutants"
LEAST_KILLED = 0.9
WARM = ("compressed_tensors", "hypothesis", "numba", "pytest", "rich", "safetensors.torch")
WARM += ("tokenizers", "torch", "transformers.models.deepseek_v3.modeling_deepseek_v3")
PYTEST = ["-x", "-q", "--tb=line", "-p", "no:cacheprovider", "-p", "no:xdist"]
PYTEST += ["--basetemp", str(BUILD / "tmp"), "--hypothesis-profile", "mutants"]
PYTEST += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of plugins that WARM has loaded
LOG = BUILD / "pytest.log"
MEMORY_BYTES = 16 << 30
NO_TESTS, INTERNAL_ERROR = 5, 70  # exit codes of pytest and of a fork


@dataclass(frozen=True)
class Group:
    """Files of a room that share their tests."""

    room: str
    files: tuple[str, ...]
    tests: tuple[str, ...]


@dataclass(frozen=True)
class Mutant:
    """A file with one fault. diff: its path and the lines that differ, as in docs/mutants.md."""

    group: Group
    file: str
    code: str
    diff: str


def operator_call_removal(node: cst.Expr) -> Iterator[cst.Expr]:
    """Leave out a call whose result nobody takes."""
    if isinstance(node.value, cst.Call):
        yield cst.Expr(cst.Ellipsis())


class Visitor(MutationVisitor):
    """mutmut's visitor, in decorated classes and functions too.

    It leaves out words of messages, type aliases and type variables, which annotations alone use,
    and __all__.
    """

    def __init__(self) -> None:
        operators = [*mutation_operators, (cst.Expr, operator_call_removal)]
        super().__init__(operators, IgnoredCode(set(), set(), set()))
        self._messages = 0

    def on_visit(self, node: cst.CSTNode) -> bool:
        self._messages += is_message(node)
        return bool(super().on_visit(node))

    def on_leave(self, original_node: cst.CSTNode) -> None:
        super().on_leave(original_node)
        self._messages -= is_message(original_node)

    def _should_mutate_node(self, node: cst.CSTNode) -> bool:
        return not (self._messages and isinstance(node, cst.BaseString))

    def _skip_node_and_children(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.ClassDef | cst.FunctionDef):
            return False
        skipped = isinstance(node, cst.Decorator) or is_alias(node)
        return skipped or bool(super()._skip_node_and_children(node))


def is_message(node: cst.CSTNode) -> bool:
    """Return True for an assertion, for what is raised and for an error's construction."""
    if isinstance(node, cst.Call) and isinstance(node.func, cst.Name):
        return node.func.value.endswith("Error")
    return isinstance(node, cst.Assert | cst.Raise)


def is_alias(node: cst.CSTNode) -> bool:
    """Return True for an assignment to a name in CamelCase or to __all__, and of a TypeVar."""
    if not isinstance(node, cst.Assign) or not isinstance(node.targets[0].target, cst.Name):
        return False
    name, value = node.targets[0].target.value, node.value
    called = value.func if isinstance(value, cst.Call) else None
    made_by = called.value if isinstance(called, cst.Name) else None
    is_type_variable = made_by in ("ParamSpec", "TypeVar")
    is_type = name[0].isupper() and not name.isupper()
    return name == "__all__" or is_type_variable or is_type


def read_groups(only: str) -> list[Group]:
    """Return the groups of mutants.toml, with those of their files whose paths start so."""
    rooms = tomllib.loads((ROOT / "scripts/mutants.toml").read_text())
    groups = [
        Group(room, tuple(f for f in part["files"] if f.startswith(only)), tuple(part["tests"]))
        for room, parts in rooms.items()
        for part in parts
    ]
    return [group for group in groups if group.files]


def mutants_of(groups: list[Group], sample: int | None, seed: int) -> tuple[list[Mutant], int]:
    """Return mutants of the groups of one room, a random sample of them, and their number."""
    places = []
    for group in groups:
        for file in group.files:
            source = (ROOT / file).read_text()
            visitor = Visitor()
            module = MetadataWrapper(cst.parse_module(source)).visit(visitor)
            places += [(group, file, source, module, one) for one in visitor.mutations]
    wanted = len(places) if sample is None else sample
    order = list(range(len(places)))
    random.Random(f"{seed} {groups[0].room}").shuffle(order)
    chosen: dict[int, Mutant] = {}
    for number in order:
        if len(chosen) == wanted:
            break
        group, file, source, module, one = places[number]
        code = deep_replace(module, one.original_node, one.mutated_node).code
        if is_valid(code):
            chosen[number] = Mutant(group, file, code, diff_of(file, source, code))
    return [chosen[number] for number in sorted(chosen)], len(places)


def is_valid(code: str) -> bool:
    try:
        ast.parse(code)
    except SyntaxError:
        return False
    return True


def diff_of(file: str, before: str, after: str) -> str:
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm="")
    changed = [line for line in list(lines)[2:] if not line.startswith("@@")]
    return "\n".join([file, *changed])


def start() -> None:
    """Make this process one to fork: with the large packages loaded, and none of ours."""
    os.chdir(ROOT)
    BUILD.mkdir(parents=True, exist_ok=True)
    for name in WARM:
        importlib.import_module(name)
    from hypothesis import Phase, settings

    # Shrinking is of no use here, and an example of one mutant must not be tried on the next.
    settings.register_profile(
        "mutants", database=None, derandomize=True, phases=[Phase.explicit, Phase.generate]
    )


def run_tests(group: Group, mutant: Mutant | None, timeout_seconds: float) -> int | None:
    """Return pytest's exit code in a fork, negative for a signal; None when time ran out."""
    child = os.fork()
    if child == 0:
        code = INTERNAL_ERROR
        try:
            code = in_the_fork(group, mutant)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    end = time.monotonic() + timeout_seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def in_the_fork(group: Group, mutant: Mutant | None) -> int:
    import pytest

    os.setsid()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    log = os.open(LOG, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if mutant is not None:
        plant(str(ROOT / mutant.file), mutant.code)
    return int(pytest.main([*PYTEST, *group.tests]))


def plant(path: str, code: str) -> None:
    """Have this process import other code in place of a file's."""
    real = SourceFileLoader.get_code

    def get_code(loader: SourceFileLoader, name: str) -> CodeType | None:
        if loader.path == path:
            return compile(code, path, "exec", dont_inherit=True)
        return real(loader, name)

    SourceFileLoader.get_code = get_code


def seconds_of(group: Group) -> float:
    """Run tests on the code as it is, which also compiles kernels."""
    began = time.monotonic()
    code = run_tests(group, None, 1800.0)
    if code != 0:
        sys.exit(f"Without a mutant, exit code {code}: {group}\n{LOG.read_text()[-3000:]}")
    return time.monotonic() - began


def run_mutant(mutant: Mutant, timeout_seconds: float) -> str:
    """Return killed, timeout or survived."""
    code = run_tests(mutant.group, mutant, timeout_seconds)
    assert code not in (NO_TESTS, INTERNAL_ERROR), LOG.read_text()[-3000:]
    if code is None:
        return "timeout"
    return "survived" if code == 0 else "killed"


def run_room(room: str, groups: list[Group], options: argparse.Namespace, listed: str) -> Counter:
    """Run the mutants of a room, print survivors as they come, and return the counts."""
    mutants, number = mutants_of(groups, options.sample, options.seed)
    counts = Counter(mutants=number, tried=len(mutants))
    print(f"{room}: {len(mutants)} of {number} mutants", flush=True)
    seconds: dict[Group, float] = {}
    for mutant in mutants:
        if mutant.group not in seconds:
            seconds[mutant.group] = seconds_of(mutant.group)
        outcome = run_mutant(mutant, 30 + 5 * seconds[mutant.group])
        if outcome == "survived" and mutant.diff in listed:
            outcome = "listed"
        counts[outcome] += 1
        if outcome in ("survived", "timeout"):
            print(f"\n{outcome}\n{mutant.diff}", flush=True)
        with (BUILD / "results.jsonl").open("a") as file:
            line = {"room": room, "file": mutant.file, "diff": mutant.diff, "outcome": outcome}
            file.write(json.dumps(line) + "\n")
    return counts


def report(rooms: dict[str, Counter]) -> int:
    """Print the table; return the exit code."""
    columns = ("mutants", "tried", "killed", "timeout", "listed", "survived")
    total = sum(rooms.values(), Counter())
    print(f"\n| room | {' | '.join(columns)} | share killed |\n|---|{'---:|' * 7}")
    for room, counts in {**rooms, "all": total}.items():
        figures = " | ".join(str(counts[column]) for column in columns)
        print(f"| {room} | {figures} | {killed_share(counts):.1%} |")
    return int(bool(total["survived"]) or killed_share(total) < LEAST_KILLED)


def killed_share(counts: Counter) -> float:
    return (counts["killed"] + counts["timeout"]) / max(1, counts["tried"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sample", type=int, help="mutants per room; all without it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="start of the paths to mutate")
    options = parser.parse_args()
    groups = read_groups(options.only)
    if not groups:
        parser.error(f"mutants.toml has no file below {options.only}")
    listed = (ROOT / "docs/mutants.md").read_text()
    start()
    (BUILD / "results.jsonl").unlink(missing_ok=True)
    rooms = {}
    for room in dict.fromkeys(group.room for group in groups):
        own = [group for group in groups if group.room == room]
        rooms[room] = run_room(room, own, options, listed)
    return report(rooms)


if __name__ == "__main__":
    sys.exit(main())
