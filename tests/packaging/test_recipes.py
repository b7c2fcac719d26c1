"""Commands of the weekly recipe, and the markers that keep long tests out of the default run."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
WEEKLY: dict[Any, Any] = yaml.safe_load((ROOT / ".github/workflows/weekly.yml").read_text())
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_it_starts_every_week_and_not_per_push() -> None:
    starts = WEEKLY[True]  # YAML 1.1 reads the key `on` as true
    assert starts.keys() == {"schedule", "workflow_dispatch"}
    (entry,) = starts["schedule"]
    assert re.fullmatch(r"\d+ \d+ \* \* \d", entry["cron"])


def test_it_installs_without_constraints_and_runs_the_demo() -> None:
    checkout, python, install, demo = WEEKLY["jobs"]["install"]["steps"]
    assert checkout["uses"].startswith("actions/checkout@")
    assert f">={python['with']['python-version']}" == PROJECT["project"]["requires-python"]
    torch, tree = install["run"].splitlines()
    assert torch.split()[:-1] == ["python", "-m", "pip", "install"]
    assert torch.split()[-1] in (ROOT / "constraints.txt").read_text().splitlines()
    assert tree == "python -m pip install ."
    assert demo["run"] == 'BIN="$(dirname "$(command -v mtp-export)")" scripts/demo'


def test_nightly_tests_are_not_in_the_default_run() -> None:
    options = PROJECT["tool"]["pytest"]["ini_options"]
    assert "-m 'not nightly'" in options["addopts"]
    assert any(marker.startswith("nightly: ") for marker in options["markers"])
    text = (ROOT / "tests/packaging/test_wheel.py").read_text()
    assert text.count("@pytest.mark.nightly") == text.count("\ndef test_")


def test_what_is_imported_is_a_dependency() -> None:
    names = {re.split(r"[<>=]", line)[0] for line in PROJECT["project"]["dependencies"]}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.split("==")[0].replace("_", "-") for line in lines}
    assert {"rich", "tqdm", "typer"} <= names <= pinned
