"""export, quantize and serve as people see them: terminals of all kinds, and pipes."""

from __future__ import annotations

import re
import shlex
import signal
from functools import partial
from itertools import product
from pathlib import Path

import pytest
from rich.cells import cell_len

from cases import nightly_but, run_in_a_fork, run_program
from forked import Forked, Pipe, environment_of, program
from terminal.screen import Seen, Terminal, in_pipe, in_terminal

FIXTURE = Path(__file__).resolve().parents[2] / "fixtures/deepseek-v3-tiny"
SERVED = FIXTURE.parent / "glm4-moe-tiny"  # of few layers
INT4 = (
    *("--base-quant", "weight_only_int4", "--mtp-quant", "weight_only_int8"),
    *("--group-size", "64"),
)
# What is copied is never broken: words of commands, and paths in headings.
COPIED = re.compile(r"Exported to|Quantized to| *(--[a-z-]+ )?('[^']*'|\S+)( \\)?$")
COLOUR = re.compile(r"\x1b\[(?:\d+;)*(?:3[0-7]|9[0-7]|38|48|4[0-7])(?:;\d+)*m")
SIZES = pytest.mark.parametrize(("columns", "rows"), [(80, 24), (40, 20)])
NO_COLOR, DUMB = {"NO_COLOR": "1"}, {"TERM": "dumb"}


def too_wide(seen: Seen, columns: int) -> list[str]:
    return [state for state in seen.wider_than(columns) if not COPIED.match(state)]


def words_of(command: str, folder: Path, source: Path) -> tuple[object, ...]:
    output = ("--output-dir", folder / "out")
    if command == "export":
        return "export", "--input-dir", source, *output
    return "quantize", "--input-dir", source, *output, *INT4


def assert_key_lines(command: str, seen: Seen, folder: Path) -> None:
    """The result's heading, its figures, and the commands that follow."""
    out = folder / "out"
    assert seen.code == 0, seen.text
    assert f"{'Exported' if command == 'export' else 'Quantized'} to {out}" in seen.lines
    text = " ".join(seen.text.split())
    assert re.search(r"written in [\d.]+ s, [\d.]+ \wB/s\.", text)
    assert "3.0 MB before, " in text and " bits per weight." in text
    if command == "quantize":
        assert "Worst: " in text and "verify asks for 12 dB or more." in text
    lines = seen.as_a_shell_reads.splitlines()
    assert any(line.startswith(f"Check it:  mtp-export verify {out} ") for line in lines)
    assert any(line.startswith(f"vllm serve {out}/main ") for line in lines)


@SIZES
@pytest.mark.parametrize("command", ["export", "quantize"])
def test_results_fit_the_terminal(command: str, columns: int, rows: int, tmp_path: Path) -> None:
    words = words_of(command, tmp_path, SERVED)
    seen = in_terminal(*words, columns=columns, rows=rows)
    assert_key_lines(command, seen, tmp_path)
    assert too_wide(seen, columns) == []
    first = {"export": "main", "quantize": "shared expert"}[command]
    (row,) = (line for line in seen.lines if re.match(rf"(│ )?{first}\b", line))
    assert row.startswith("│ ") is (columns == 80)
    left = r"100%\|.*\| .* of .*, 00:00 left" if columns == 80 else rf"100%, 00:00 left: {command}"
    assert any(re.search(left, line) for line in seen.lines)


@pytest.mark.parametrize(
    ("command", "environment"),
    nightly_but(
        [("export", NO_COLOR), ("quantize", DUMB)],
        product(["export", "quantize"], [NO_COLOR, DUMB]),
    ),
    ids=str,
)
def test_results_have_no_colour_where_none_belongs(
    command: str, environment: dict[str, str], tmp_path: Path
) -> None:
    seen = in_terminal(*words_of(command, tmp_path, SERVED), environment=environment)
    assert_key_lines(command, seen, tmp_path)
    assert not COLOUR.search(seen.raw)
    if "TERM" in environment:
        assert seen.escapes == []


@pytest.mark.parametrize("command", ["export", "quantize"])
def test_results_in_a_pipe_are_plain_lines(command: str, tmp_path: Path) -> None:
    seen = in_pipe(*words_of(command, tmp_path, SERVED))
    assert_key_lines(command, seen, tmp_path)
    assert seen.escapes == [] and "\r" not in seen.raw
    assert any(re.fullmatch(rf"{command}: 100%, .* left", line) for line in seen.lines)


def test_rows_of_a_narrow_table_have_their_names(tmp_path: Path) -> None:
    text = " ".join(in_terminal("quantize", "--list", columns=40, rows=20).text.split())
    assert "weight_only_int4 + weight_only_int8: on disk int4 + bf16" in text
    assert "version: " in in_terminal("env", columns=24, rows=20).text


@pytest.mark.parametrize("columns", [80, 60, 40])
def test_an_inspection_fits_the_terminal(columns: int) -> None:
    """Also as rows that became lines; what follows a first line is below it, indented."""
    seen = in_terminal("inspect", SERVED, columns=columns, rows=20)
    assert seen.code == 0 and seen.wider_than(columns) == []
    copy = next(i for i, line in enumerate(seen.lines) if line.startswith("model.layers.3.embed"))
    assert seen.lines[copy + 1].startswith("  ") and seen.lines[copy + 1].strip()
    row = next(i for i, line in enumerate(seen.lines) if "routed expert" in line)
    assert seen.lines[row].startswith("│") is (columns == 80)
    assert columns == 80 or seen.lines[row + 1].startswith("  ")


def assert_served(seen: Seen, columns: int | None) -> None:
    """The banner and the end of a server; its command is whole."""
    assert seen.code == 0, seen.text
    starts = ("Page ", "API ", "Metrics ", "Try ")
    assert [line.split()[0] for line in seen.lines if line.startswith(starts)] == [
        start.strip() for start in starts
    ]
    assert "Ctrl-C stops it." in seen.lines and seen.lines[-1] == "Stopped: 0 requests served."
    if columns is not None:
        copied = (*starts, "  curl", "  -d")
        wide = [each for each in seen.wider_than(columns) if not each.startswith(copied)]
        assert wide == [], wide


def stopped(columns: int, rows: int, environment: dict[str, str]) -> Seen:
    words = ("serve", SERVED, "--port", 0)
    with Terminal(*words, columns=columns, rows=rows, environment=environment) as terminal:
        terminal.wait_for("Ctrl-C stops it.")
        terminal.press("\x03")
        return terminal.finish()


@pytest.mark.parametrize(("columns", "rows"), nightly_but([(40, 20)], [(80, 24), (40, 20)]))
def test_a_server_fits_the_terminal(columns: int, rows: int) -> None:
    seen = stopped(columns, rows, {})
    assert_served(seen, columns)
    assert f"Loading {SERVED.name}" in seen.raw


@pytest.mark.parametrize("environment", nightly_but([DUMB], [NO_COLOR, DUMB]), ids=str)
def test_a_server_has_no_colour_where_none_belongs(environment: dict[str, str]) -> None:
    seen = stopped(80, 24, environment)
    assert_served(seen, 80)
    assert not COLOUR.search(seen.raw)
    if "TERM" in environment:
        assert seen.escapes == []


def test_a_server_in_a_pipe_writes_plain_lines() -> None:
    pipe, words = Pipe(), ("serve", SERVED, "--port", 0)
    server = Forked(program, *words, streams=(0, pipe, pipe), environment=environment_of({}))
    with pipe as output:
        lines = []
        for line in output:
            lines.append(line)
            if "Ctrl-C stops it." in line:
                server.send_signal(signal.SIGINT)
        seen = Seen(server.wait(60), "".join(lines))
    assert_served(seen, None)
    assert seen.escapes == [] and "\r" not in seen.raw
    assert all(cell_len(line) < 200 for line in seen.lines)


def test_another_command_than_the_unfinished_one_is_told_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the whole command that finishes it, and no bar of a run that does not begin."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "source").symlink_to(FIXTURE)
    words = ("--output-dir", "a bundle", "--link", "copy", "--max-shard-size", "1MB")
    assert run_in_a_fork(partial(run_program, "export", "source", *words, "--quiet"), 60) == 9
    seen = in_terminal("export", "source", "a bundle", columns=60, folder=tmp_path)
    assert seen.code == 8 and not re.search(r"\d%", seen.raw)
    said = " ".join(seen.text.split())
    assert "an unfinished run of something else (a bundle). Expected links main/" in said
    assert "hint: Pass --no-resume to start over, choose another --output-dir, or finish" in said
    command = seen.as_a_shell_reads.splitlines()[-1].strip()
    assert command == (
        f"mtp-export export --input-dir {tmp_path}/source --max-shard-size 1000000 --link copy"
        " --quiet --output-dir 'a bundle'"
    )
    piped = in_pipe("export", "source", "a bundle", folder=tmp_path)
    assert len(piped.lines) == 1 and piped.lines[0].endswith(f" by its own command: {command}")
    assert run_program(*shlex.split(command)[1:]).code == 0
    assert (tmp_path / "a bundle/mtp_export.json").is_file()


@SIZES
def test_errors_are_broken_between_words(columns: int, rows: int) -> None:
    arguments = ("quantize", "--base-quant", "int4")
    seen = in_terminal(*arguments, columns=columns, rows=rows)
    assert seen.code == 2 and not seen.wider_than(columns)
    piped = in_pipe(*arguments)
    assert len(piped.lines) == 1
    assert " ".join(seen.lines).replace("hint: ", "") == piped.text
