"""The local server as a user starts it: the commands that docs/hub.md shows with it run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cases import run_program
from pages import ROOT, blocks_of

SERVER = (sys.executable, "-m", "tests.hub_server", "--port", "0")


@pytest.fixture(scope="module")
def printed() -> Iterator[str]:
    """Lines that the server prints as it starts."""
    with subprocess.Popen(SERVER, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield "".join(server.stdout.readline() for _ in range(4))
        server.terminate()


def test_the_commands_of_the_page_run_with_it(
    printed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (block,) = [b for b in blocks_of(ROOT / "docs/hub.md") if "tests.hub_server" in b.text]
    start, variables, *commands = block.commands
    assert start == "python -m tests.hub_server '&'"
    assert len(commands) == 3
    for name, value in re.findall(r"(\w+)=(\S+)", printed):
        # The page has the port that the server takes by itself.
        assert f"{name}={value}".replace(value.rpartition(":")[2], "8017") in variables or (
            f"{name}={value}" in variables
        )
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    for command in commands:
        program, *arguments = shlex.split(command)
        outcome = run_program(*arguments)
        assert (program, outcome.code) == ("mtp-export", 0), outcome.err


def test_a_folder_gets_the_name_that_it_is_given(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    with subprocess.Popen(
        [*SERVER, f"org/name={folder}", str(folder)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        first, second = (server.stdout.readline() for _ in range(2))
        server.terminate()
    assert first.startswith("hf://org/name@") and second.startswith("hf://local/model@")


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    done = subprocess.run(
        [*SERVER, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, env=os.environ
    )
    assert done.returncode == 2 and "no checkpoint" in done.stderr
