"""Completion in the shells themselves, by the scripts that are installed for them."""

from __future__ import annotations

import os
import pty
import select
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cases import run_program
from mtp_export.commands.names import COMMANDS
from mtp_export.commands.registry import command_named

LINES = [
    ("mtp-export qu", "quantize"),
    ("mtp-export launch x --engine v", "vllm"),
    ("mtp-export verify --lev", "--level"),
    ("mtp-export generate x --speculate-method inf", "inference_with_reference"),
    ("mtp-export quantize --int4-scope e", "experts"),
]
SECONDS = 60.0


@pytest.fixture
def shell_environment(tmp_path: Path) -> dict[str, str]:
    """Variables of a shell that finds the program, and no settings of a user's."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "mtp-export"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m mtp_export "$@"\n')
    program.chmod(0o755)
    found = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "TERM": "dumb",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    return {name: value for name, value in os.environ.items() if name != "ZDOTDIR"} | found


def script_of(shell: str, folder: Path) -> Path:
    path = folder / f"completion.{shell}"
    path.write_text(run_program("--show-completion", shell).out)
    return path


def in_shell(shell: str, command: str, environment: dict[str, str]) -> list[str]:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    done = subprocess.run(
        [shell, "-c", command], env=environment, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(("line", "completed"), LINES)
def test_fish(line: str, completed: str, shell_environment: dict[str, str], tmp_path: Path) -> None:
    script = script_of("fish", tmp_path)
    found = in_shell("fish", f"source {script}; complete -C {shlex.quote(line)}", shell_environment)
    assert [each.split("\t")[0] for each in found] == [completed]


@pytest.mark.parametrize(("line", "completed"), LINES)
def test_bash(line: str, completed: str, shell_environment: dict[str, str], tmp_path: Path) -> None:
    script, words = script_of("bash", tmp_path), line.split()
    asked = (
        f"source {script}; COMP_WORDS=({shlex.join(words)}); COMP_CWORD={len(words) - 1};"
        " _mtp_export_completion mtp-export; printf '%s\\n' \"${COMPREPLY[@]}\""
    )
    assert in_shell("bash", asked, shell_environment) == [completed]


def test_zsh(shell_environment: dict[str, str], tmp_path: Path) -> None:
    """Typed at a prompt: zsh completes nowhere else."""
    zsh = shutil.which("zsh")
    if zsh is None:
        pytest.skip("zsh is not installed")
    script = script_of("zsh", tmp_path)
    set_up = f"autoload -U compinit; compinit -u -d {tmp_path}/dump; source {script}; PS1='>'"
    process, terminal = pty.fork()
    if process == 0:
        os.execve(zsh, [zsh, "-f", "-i"], shell_environment)
    try:
        os.write(terminal, f"{set_up}; echo rea''dy\n".encode())
        read_until(terminal, "\nready")
        for line, completed in LINES:
            rest = completed.removeprefix(line.split()[-1])
            os.write(terminal, f"{line}\t".encode())
            read_until(terminal, f"{line}{rest} " if rest else f"{line} ")
            os.write(terminal, b"\x15")  # Ctrl-U: an empty line again
    finally:
        os.kill(process, 9)
        os.waitpid(process, 0)
        os.close(terminal)


@pytest.mark.parametrize("command", COMMANDS)
def test_no_help_has_a_mark_that_zsh_drops(command: str) -> None:
    """Typer's script for zsh takes an apostrophe for the end of a word in quotes."""
    shown = [COMMANDS[command]]
    shown += [getattr(one, "help", None) or "" for one in command_named(command).params]
    assert not [text for text in shown if "'" in text]


def read_until(terminal: int, text: str) -> None:
    """Read what a terminal shows until a text is in it, but for the line's own redrawing."""
    seen, end = "", time.monotonic() + SECONDS
    while text not in seen.replace("\r\n", "\n").replace("\b", ""):
        assert time.monotonic() < end, seen
        if select.select([terminal], [], [], 1.0)[0]:
            seen += os.read(terminal, 4096).decode(errors="replace")
