"""Every planted fault is caught by the check that it belongs to, with its cause in words; every
good bundle passes."""

from __future__ import annotations

import json
import runpy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cases import run_program
from end_to_end.fault import Fault
from end_to_end.faults import FAULTS
from end_to_end.small_model import ROWS, TARGETS, write_dense, write_fp8, write_row, write_target
from mtp_export.verify import CHECKS

LEVELS = {"files": "files", "ledger": "weights", "weights": "weights"}
Bundles = Callable[[str], Path]


@pytest.fixture(scope="session")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Bundles:
    """Good bundles by name, each made once; not to be changed. `source` is what they are made
    from."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            folder = tmp_path_factory.mktemp("good") / "bundle"
            if name == "dense":
                made[name] = write_dense(folder)
            elif name == "source":
                made[name] = write_fp8(make("dense"), folder)
            elif name in ROWS:
                made[name] = write_row(make("source"), folder, name)
            else:
                made[name] = write_target(make("source"), folder, name)
        return made[name]

    return make


def failures(report: dict[str, Any]) -> dict[str, str]:
    """Per check that failed, what its failed items say."""
    return {
        check["name"]: " | ".join(
            f"{item['name']}: {item['subject']}: {item['cause']}"
            for item in check["items"]
            if item["status"] == "fail"
        )
        for check in report["checks"]
        if check["status"] == "fail"
    }


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_is_caught(fault: Fault, bundles: Bundles, tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(bundles(fault.needs), tmp_path / "bundle"))
    fault.plant(bundle)
    options = ["--level", LEVELS.get(fault.caught_by, "run"), "--json", "--quiet"]
    if fault.source:
        options += ["--source", str(bundles("source"))]
    outcome = run_program("verify", bundle, *options)
    assert outcome.code == 7, outcome.err
    failed = failures(json.loads(outcome.out))
    assert fault.cause in failed.get(fault.caught_by, ""), failed


@pytest.mark.parametrize("name", ["source", *ROWS, *TARGETS])
def test_good_bundle_passes(name: str, bundles: Bundles) -> None:
    source = bundles("dense" if name == "source" else "source")
    outcome = run_program(
        "verify", bundles(name), "--source", source, "--level", "weights", "--quiet"
    )
    assert outcome.code == 0, outcome.err


def test_the_page_of_faults_is_up_to_date() -> None:
    root = Path(__file__).resolve().parents[2]
    script = runpy.run_path(str(root / "scripts/faults_table.py"))
    assert (root / "docs/faults.md").read_text() == script["table"]()


def test_each_fault_has_a_name_and_a_check_of_its_own() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert {fault.caught_by for fault in FAULTS} <= set(CHECKS)
