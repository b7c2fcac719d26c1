"""Every planted fault is caught by the check that it belongs to, with its cause in words."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cases import export, run_program
from end_to_end.faults import FAULTS, Fault

FIXTURE = Path(__file__).resolve().parents[2] / "fixtures/deepseek-v3-tiny"
LEVELS = {"files": "files", "ledger": "weights", "weights": "weights"}
BUNDLES: dict[str, Callable[[Path], object]] = {
    "fp8": lambda output: export(FIXTURE, output, "--link", "copy", "--quiet"),
}


@pytest.fixture(scope="session")
def good(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Good bundles by name, each made once; not to be changed."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("good") / name
            BUNDLES[name](made[name])
        return made[name]

    return make


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_is_caught(fault: Fault, good: Callable[[str], Path], tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(good(fault.needs), tmp_path / "bundle"))
    fault.plant(bundle)
    options = ["--level", LEVELS.get(fault.caught_by, "run"), "--json", "--quiet"]
    options += ["--source", str(FIXTURE)] if fault.source else []
    outcome = run_program("verify", bundle, *options)
    assert outcome.code == 7, outcome.err
    failed = {
        check["name"]: " ".join(
            f"{item['name']} {item['subject']} {item['cause']}"
            for item in check["items"]
            if item["status"] == "fail"
        )
        for check in json.loads(outcome.out)["checks"]
    }
    assert fault.cause in failed[fault.caught_by], failed


@pytest.mark.parametrize("name", BUNDLES)
def test_good_bundle_passes(name: str, good: Callable[[str], Path]) -> None:
    outcome = run_program("verify", good(name), "--level", "weights", "--quiet")
    assert outcome.code == 0, outcome.err
