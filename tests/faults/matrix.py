"""The rows of docs/faults.md: checks that fail for a fault, by running them."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Container, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cases import export, run_program
from faults.fault import Fault
from faults.run_faults import RUN_FAULTS
from faults.runtime_faults import RUNTIME_FAULTS
from faults.small_model import (
    CHANNELS,
    ROWS,
    TARGETS,
    family_config,
    write_channels,
    write_dense,
    write_fp8,
    write_row,
    write_target,
)
from mtp_checkpoints.families import FAMILIES
from mtp_export.progress import ProgressCallback, silent
from mtp_export.verify import CHECKS, check_result
from mtp_export.verify.check import Level
from mtp_export.verify.context import Context
from mtp_export.verify.options import VerifyOptions

FIXTURE = Path(__file__).resolve().parents[2] / "fixtures/deepseek-v3-tiny"
STATIC = ("files", "ledger", "weights")
# All checks with bounds; `speed` reports, and `stream` is acceptance computed another way.
RUN = (*STATIC, "greedy", "sampling", "acceptance", "differential", "controls", "paths")
RUN_TOKENS = 32
NOTHING = "nothing planted"
_SOURCE = ", its source"
_OF_FAMILIES = (*FAMILIES, CHANNELS)
FAILS, PASSES, NOT_RUN = "**fail**", "pass", "–"


class Bundles:
    """Good bundles by name, each made once and not to be changed. `source` is the one that the
    others are made from; a model_type, or CHANNELS, is a bundle made from a source of its own.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[str, Path] = {}

    def __call__(self, name: str) -> Path:
        if name not in self._made:
            self._folder.mkdir(exist_ok=True)
            folder = self._folder / str(len(self._made))
            self._made[name] = folder
            if name == "dense":
                write_dense(folder)
            elif name == "source":
                write_fp8(self("dense"), folder)
            elif name in ROWS:
                write_row(self("source"), folder, name)
            elif name == CHANNELS + _SOURCE:
                write_channels(self("glm4_moe" + _SOURCE), folder)
            elif name.endswith(_SOURCE):
                write_dense(folder, config=family_config(name.removesuffix(_SOURCE)))
            elif name in _OF_FAMILIES:
                write_target(self(name + _SOURCE), folder, "hf")
            else:
                assert name in TARGETS
                write_target(self("source"), folder, name)
        return self._made[name]

    def source_of(self, name: str) -> Path:
        """The checkpoint or bundle that a good bundle was made from."""
        return self(name + _SOURCE if name in _OF_FAMILIES else "source")


def verified(
    fault: Fault, bundles: Bundles, folder: Path, *options: object
) -> tuple[int, dict[str, Any]]:
    """Exit code and report of verify on a copy of a good bundle with the fault in it."""
    bundle = Path(shutil.copytree(bundles(fault.needs), folder))
    fault.plant(bundle)
    outcome = run_program("verify", bundle, "--json", "--quiet", *options)
    return outcome.code, json.loads(outcome.out)


def statuses(report: dict[str, Any]) -> dict[str, str]:
    """The status of each check."""
    return {check["name"]: check["status"] for check in report["checks"]}


def cells(found: dict[str, str], checks: Sequence[str]) -> list[str]:
    """The marks of a row."""
    marks = {"fail": FAILS, "pass": PASSES}
    return [marks.get(found.get(check, ""), NOT_RUN) for check in checks]


def executed(fault: Fault, bundles: Bundles, folder: Path) -> list[str]:
    """The marks of a fault in files or weights: all checks that need no run, with the source."""
    options = ("--level", "weights", "--source", bundles.source_of(fault.needs))
    return cells(statuses(verified(fault, bundles, folder, *options)[1]), STATIC)


def run_rows(folder: Path, done: Container[str] = ()) -> Iterator[tuple[str, list[str]]]:
    """Names and marks of faults planted into the trained fixture, or into the runtime, but for
    those in done."""
    good = folder / "good"
    assert export(FIXTURE, good, "--link", "copy", "--quiet").code == 0
    whole = _context(good)
    if NOTHING not in done:
        yield NOTHING, _run_cells(replace(whole))
    for planted in RUNTIME_FAULTS:
        if planted.name not in done:
            with pytest.MonkeyPatch.context() as patch:
                planted.plant(patch)
                yield planted.name, _run_cells(replace(whole))
    for number, fault in enumerate(RUN_FAULTS):
        if fault.name not in done:
            bundle = Path(shutil.copytree(good, folder / f"run{number}"))
            fault.plant(bundle)
            yield fault.name, _run_cells(_context(bundle))
            shutil.rmtree(bundle)


@contextlib.contextmanager
def no_progress(title: str, total_bytes: int) -> Iterator[ProgressCallback]:
    """Show nothing."""
    yield silent


def _context(bundle: Path) -> Context:
    options = VerifyOptions(bundle, FIXTURE, Level.RUN, max_new_tokens=RUN_TOKENS, ks=(2,))
    return Context.open(options, no_progress)


def _run_cells(context: Context) -> list[str]:
    """The marks of every check of RUN."""
    return cells({name: check_result(name, CHECKS[name], context).status for name in RUN}, RUN)


def pages_cells(page: str, heading: str, name: str, count: int) -> list[str]:
    """The marks of a fault's row in a section of the page; empty if it has no such row."""
    section = page.split(f"## {heading}\n")[-1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith(f"| {name} | ")]
    marks = rows[0].split(" | ")[2 : 2 + count] if rows else []
    return marks if set(marks) <= {FAILS, PASSES, NOT_RUN} else []
