"""Output that nobody reads or that cannot be written, and a lost standard error."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest

from cases import Outcome, looks_finished, tree
from mtp_export.cli import main
from mtp_export.commands import standard_streams

FULL = Path("/dev/full")
pytestmark = pytest.mark.skipif(not FULL.exists(), reason="the system has no /dev/full")


def run_on(out: TextIO, err: TextIO, *arguments: object) -> int:
    """Exit code of the program with these streams."""
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as end,
    ):
        main([str(argument) for argument in arguments])
    assert isinstance(end.value.code, int)
    return end.value.code


@pytest.fixture
def full() -> Iterator[TextIO]:
    """A file on a full disk; closing it fails if anything is left to be written."""
    with FULL.open("w") as file:
        yield file


@pytest.fixture
def unread() -> Iterator[TextIO]:
    """A pipe whose reader is gone."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as file:
        yield file


COMMANDS = [("--help",), ("--version",), ("inspect", "{source}"), ("inspect", "{source}", "--json")]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_output_that_cannot_be_written_is_a_failure(
    command: tuple[str, ...], pristine: Path, full: TextIO
) -> None:
    err = io.StringIO()
    assert run_on(full, err, *(part.format(source=pristine) for part in command)) == 6
    assert "No space left on device" in err.getvalue()
    assert err.getvalue().count("\n") == 1


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_output_without_a_reader_ends_quietly(
    command: tuple[str, ...], pristine: Path, unread: TextIO
) -> None:
    err = io.StringIO()
    assert run_on(unread, err, *(part.format(source=pristine) for part in command)) == 141
    assert err.getvalue() == ""


def test_an_export_finishes_what_it_cannot_tell(pristine: Path, output: Path, full: TextIO) -> None:
    report = output.parent / "r.json"
    arguments = ["--input-dir", pristine, "--output-dir", output, "--report", report]
    assert run_on(full, io.StringIO(), *arguments) == 6
    assert looks_finished(output)
    assert json.loads(report.read_text())["output_dir"] == str(output)


@pytest.mark.parametrize("lost", ["full", "unread"])
def test_a_lost_stderr_ends_nothing(
    lost: str, pristine: Path, output: Path, request: pytest.FixtureRequest
) -> None:
    err, out = request.getfixturevalue(lost), io.StringIO()
    assert run_on(out, err, "--input-dir", pristine, "--output-dir", output) == 0
    assert looks_finished(output)
    assert "Exported to" in out.getvalue()
    before = tree(output)
    assert run_on(out, err, "--input-dir", pristine, "--output-dir", output, "--debug") == 8
    assert tree(output) == before


def run_in_a_shell(redirections: str, *arguments: object) -> Outcome:
    """The program as a shell starts it, with redirections."""
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {redirections}', "sh", sys.executable, "-m", "mtp_export"]
        + [str(argument) for argument in arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


def test_streams_that_were_closed_before_the_program_began(pristine: Path) -> None:
    outcome = run_in_a_shell(">&-", "--version")
    assert (outcome.code, outcome.err.count("\n")) == (6, 1)
    assert "Bad file descriptor" in outcome.err
    outcome = run_in_a_shell("2>&-", "inspect", pristine / "nowhere")
    assert (outcome.code, outcome.out) == (3, "")


def test_the_interpreter_adds_nothing_at_its_end(pristine: Path) -> None:
    """Bytes that are still buffered would be tried again, and end with a code of Python's own."""
    assert run_in_a_shell("2>/dev/full", "inspect", pristine / "nowhere").code == 3
    outcome = run_in_a_shell(">/dev/full", "--version")
    assert (outcome.code, outcome.err.count("\n")) == (6, 1)


def test_a_reader_that_does_not_read_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines that it has no room for are counted, and told when it reads on."""
    monkeypatch.setattr(standard_streams, "_END_SECONDS", 0.05)
    monkeypatch.setattr(standard_streams, "_MOST_WAITING", 100_000)
    reader, writer = os.pipe()
    line, count = "x" * 99 + "\n", 5000
    with os.fdopen(reader) as read, os.fdopen(writer, "w") as written:
        with contextlib.redirect_stderr(written), standard_streams.unblocked_stderr():
            for _ in range(count):
                print(line, end="", file=sys.stderr)
            assert not sys.stderr.isatty() and sys.stderr.fileno() == writer
            lines, lost = 0, 0
            while lines + lost < count:
                text = read.readline()
                said = re.fullmatch(r"([\d,]+) lines? were lost: nobody read them\n", text)
                assert said is not None or text == line
                lines += said is None
                lost += int(said[1].replace(",", "")) if said else 0
            print("after", file=sys.stderr)
            assert read.readline() == "after\n"
        assert sys.stderr is not written
    assert lines + lost == count and lines and lost


def test_what_waits_is_written_before_the_end() -> None:
    err = io.StringIO()
    with contextlib.redirect_stderr(err), standard_streams.unblocked_stderr():
        for number in range(100):
            print(number, file=sys.stderr)
    assert err.getvalue().split() == [*map(str, range(100))]
