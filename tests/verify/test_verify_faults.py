"""Every planted fault is caught by its check, with its cause in words; every good bundle passes."""

from __future__ import annotations

import runpy
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from cases import nightly_but, run_program
from faults.fault import Fault
from faults.faults import FAULTS
from faults.matrix import (
    FAILS,
    NOTHING,
    PASSES,
    RUN,
    STATIC,
    Bundles,
    cells,
    statuses,
    verified,
)
from faults.relation_faults import RELATION_FAULTS
from faults.run_faults import RUN_FAULTS
from faults.runtime_faults import RUNTIME_FAULTS
from faults.scheme_faults import SCHEME_FAULTS
from faults.small_model import ROWS, TARGETS
from mtp_export.verify import CHECKS

LEVELS = {"files": "files", "ledger": "weights", "weights": "weights"}
ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/faults.md").read_text()
SCRIPT = runpy.run_path(str(ROOT / "scripts/faults_table.py"))
cells_of = cache(SCRIPT["cells_of"])


@pytest.fixture(scope="session")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Bundles:
    return Bundles(tmp_path_factory.mktemp("good"))


def failures(report: dict[str, Any]) -> dict[str, str]:
    """Subjects and causes of failed items, by check."""
    return {
        check["name"]: " | ".join(
            f"{item['name']}: {item['subject']}: {item['cause']}"
            for item in check["items"]
            if item["status"] == "fail"
        )
        for check in report["checks"]
        if check["status"] == "fail"
    }


# test_relations names every relation; whole runs find a twelfth of them on each push, and of other
# faults one for each sentence of a check.
_OTHERS = [fault for fault in FAULTS if fault not in (*RELATION_FAULTS, *SCHEME_FAULTS)]
_FIRST = {(fault.caught_by, fault.cause): fault for fault in reversed(_OTHERS)}
EVERY_PUSH = [*_FIRST.values(), *RELATION_FAULTS[::12], *SCHEME_FAULTS[3::42]]


@pytest.mark.parametrize("fault", nightly_but(EVERY_PUSH, FAULTS), ids=lambda fault: fault.name)
def test_fault_is_caught(fault: Fault, bundles: Bundles, tmp_path: Path) -> None:
    options = ["--level", LEVELS[fault.caught_by]]
    checks = STATIC[: STATIC.index(fault.caught_by) + 1]
    if fault.source:
        options += ["--source", str(bundles.source_of(fault.needs))]
    code, report = verified(fault, bundles, tmp_path / "bundle", *options)
    failed = failures(report)
    assert code == 7 and fault.cause in failed.get(fault.caught_by, ""), failed
    on_the_page = cells_of(PAGE)[0][fault.name][: len(checks)]
    assert cells(statuses(report), checks) == on_the_page, "docs/faults.md says otherwise"


_GOOD = ["source", *ROWS, *TARGETS]


@pytest.mark.parametrize("name", nightly_but(_GOOD[::6], _GOOD))
def test_good_bundle_passes(name: str, bundles: Bundles) -> None:
    source = bundles("dense" if name == "source" else "source")
    outcome = run_program(
        "verify", bundles(name), "--source", source, "--level", "weights", "--quiet"
    )
    assert outcome.code == 0, outcome.err


def test_the_page_of_faults_is_up_to_date() -> None:
    assert SCRIPT["table"](*cells_of(PAGE)) == PAGE


def test_the_page_shows_every_fault_caught_by_its_check_and_nothing_else_caught() -> None:
    static, run = cells_of(PAGE)
    for fault in FAULTS:
        assert static[fault.name][STATIC.index(fault.caught_by)] == FAILS, fault.name
    for one in (*RUN_FAULTS, *RUNTIME_FAULTS):
        assert run[one.name][RUN.index(one.caught_by)] == FAILS, one.name
    assert run[NOTHING] == [PASSES] * len(RUN)


def test_each_fault_has_a_name_and_a_check_of_its_own() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert {fault.caught_by for fault in FAULTS} <= set(CHECKS)
