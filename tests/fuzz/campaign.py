"""A run of many cases, and its report: what was tried with which exits, and every fault found."""

from __future__ import annotations

import itertools
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from fuzz.cases import CASES
from fuzz.children import verdicts
from fuzz.inputs import Key, Verdict, judge
from fuzz.lab import Lab

AGAIN = (
    ".venv/bin/python -m pytest 'tests/fuzz/test_fuzz.py::test_mutated_inputs[0]'"
    " --fuzz-seed {seed} --fuzz-seconds 0"
)


_CASES_BETWEEN_LINES = 500


@dataclass
class Report:
    """Counts of a campaign, and one verdict for each distinct finding."""

    cases: int = 0
    slowest: float = 0.0
    codes: Counter[tuple[str, int]] = field(default_factory=Counter)
    mutators: Counter[str] = field(default_factory=Counter)
    commands: Counter[str] = field(default_factory=Counter)
    findings: dict[tuple[str, str], list[Verdict]] = field(default_factory=dict)

    def add(self, verdict: Verdict) -> None:
        """Count a verdict; what is found for the first time is shown at once."""
        self.cases += 1
        self.slowest = max(self.slowest, verdict.seconds)
        self.commands[verdict.command] += 1
        self.codes.update(verdict.codes)
        known = isinstance(verdict.key, str)
        names = ("known case" if known else name.split()[0] for name in verdict.mutators)
        self.mutators.update(names)
        if verdict.finding is not None:
            key = (verdict.finding.oracle, verdict.finding.place)
            if key not in self.findings:
                print(_shown(verdict), file=sys.stderr)
            self.findings.setdefault(key, []).append(verdict)

    def summary(self) -> str:
        """Return the counts as text."""
        return "\n".join(
            (
                f"{self.cases} inputs, the slowest took {self.slowest:.1f} s",
                f"by command: {_listed(self.commands)}",
                f"by mutator: {_listed(self.mutators)}",
                f"exits: {_listed(Counter({f'{n} {c}': k for (n, c), k in self.codes.items()}))}",
                f"distinct findings: {len(self.findings)}",
            )
        )

    def failures(self) -> str:
        """Return each distinct finding with what made it, and the command that runs it again."""
        return "\n\n".join(
            f"{_shown(found[0])}\n({len(found)} times)"
            for _, found in sorted(self.findings.items())
        )


def run_campaign(lab: Lab, folder: Path, first_seed: int, seconds: float) -> Report:
    """Run all known cases, then those of consecutive seeds until the time is over, one at least."""
    report = Report()
    keys = itertools.chain(CASES, _seeds(time.monotonic() + seconds, first_seed))
    for verdict in verdicts(keys, partial(_judge, lab), folder):
        report.add(verdict)
        if report.cases % _CASES_BETWEEN_LINES == 0:
            print(f"{report.cases} inputs, {len(report.findings)} findings", file=sys.stderr)
    return report


def _judge(lab: Lab, key: Key, folder: Path) -> Verdict:
    return judge(key, lab, folder)


def _seeds(deadline: float, first_seed: int) -> Iterator[int]:
    for seed in itertools.count(first_seed):
        if seed > first_seed and time.monotonic() > deadline:
            return
        yield seed


def _shown(verdict: Verdict) -> str:
    """Return a finding with what made it, and the command that runs it again."""
    found, seed = verdict.finding, verdict.key if isinstance(verdict.key, int) else 0
    assert found is not None
    return (
        f"[{found.oracle}] {found.place}\n"
        f"{verdict.command} after {'; '.join(verdict.mutators) or '?'}\n"
        f"{found.details}\n"
        f"To run it again: {AGAIN.format(seed=seed)}"
    )


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
