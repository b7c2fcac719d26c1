"""Every command that the README shows runs, and what it says of the program is so."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from cases import run_program
from mtp_export import errors
from mtp_export.targets import target_names

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
COMMANDS = [
    line
    for block in re.findall(r"```bash\n(.*?)```", README, re.S)
    for line in block.splitlines()
    if line and not line.startswith("make ")
]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder in which fixtures/ is at hand."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "fixtures").symlink_to(ROOT / "fixtures")
    return folder


@pytest.mark.parametrize("command", COMMANDS)
def test_command_runs(command: str, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, *arguments = shlex.split(command)
    assert program == "mtp-export"
    monkeypatch.chdir(workplace)
    outcome = run_program(*arguments)
    assert outcome.code == 0, outcome.err


def test_there_are_commands_and_the_two_make_targets_exist() -> None:
    assert len(COMMANDS) >= 5
    first_lines = "\n".join(README.splitlines()[:25])
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", README, re.M):
        assert f"\n{target}:" in makefile
    assert "make demo" in first_lines
    assert "make test" in first_lines


def test_every_target_option_and_exit_code_is_explained() -> None:
    for name in target_names():
        assert f"`{name}`" in README, name
    shown = (
        run_program("--help").out
        + run_program("quantize", "--help").out
        + run_program("verify", "--help").out
    )
    for option in re.findall(r"--[a-z][a-z0-9-]+", shown):
        if option not in ("--debug", "--version", "--help") and "-completion" not in option:
            assert option in README, option
    codes = {
        item.exit_code
        for item in vars(errors).values()
        if isinstance(item, type) and issubclass(item, errors.MtpExportError)
    }
    for code in codes:
        assert re.search(rf"\b{code} [A-Za-z]", README), code


def test_every_path_it_names_exists() -> None:
    for path in re.findall(
        r"`((?:benchmarks|docs|tests|scripts|fixtures|kernels)/[\w./-]+)`", README
    ):
        assert (ROOT / path).exists(), path
