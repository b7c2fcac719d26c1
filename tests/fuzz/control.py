"""Undamaged inputs, which every command must take: an oracle that refuses them tells nothing."""

from __future__ import annotations

from pathlib import Path
from random import Random

from fuzz.children import verdicts
from fuzz.commands import COMMANDS
from fuzz.inputs import Case, Verdict, judge_case
from fuzz.lab import Lab

_DRAWS = 3  # of a command's options


def run_controls(lab: Lab, folder: Path) -> None:
    """Run every command on its good inputs; all exits are 0, and nothing is found.

    What commands import and compile on first use is then there for every child.
    """
    for name, command in COMMANDS.items():
        for subject in sorted(set(command.subjects)):
            for draw in range(_DRAWS):
                case = Case(name, subject, lambda _: None, Random(draw))
                if command.starts_threads:
                    verdict = _in_a_child(case, draw, lab, folder / "child")
                else:
                    verdict = judge_case(case, draw, lab, folder / "control", [])
                where = f"{name} of {subject}, draw {draw}"
                assert verdict.finding is None, f"{where}: {verdict.finding}"
                engines_differ = (
                    {7} if "foreign" in where else set()
                )  # an engine may refuse a format
            assert {code for _, code in verdict.codes} <= {0} | engines_differ, (
                f"{where}: {verdict.codes}"
            )


def _in_a_child(case: Case, draw: int, lab: Lab, folder: Path) -> Verdict:
    judged = verdicts(
        iter([draw]), lambda key, place: judge_case(case, key, lab, place, []), folder
    )
    return next(judged)
