"""Progress of a verification as people see it: a bar with the time left, whatever it does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mtp_export.verify import CHECKS
from mtp_export.verify.check import Level
from terminal.screen import Seen, in_pipe, in_terminal

FIXTURE = Path(__file__).resolve().parents[2] / "fixtures/deepseek-v3-tiny"
FEW_LAYERS = FIXTURE.parent / "glm4-moe-tiny"  # a twentieth of the time to verify
DECODING = [
    name for name, check in CHECKS.items() if check.level is Level.RUN and check.whole_model
]
REPORTS = ("--report", "r.json", "--summary", "r.md", "--golden", "g.jsonl")
BAR = re.compile(r"([^|]+): +\d+%\|[^|]*\| \S+ of (\S+ ?\w+), .*(\d\d|\?) left")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bars")


@pytest.fixture(scope="module")
def words(folder: Path) -> tuple[object, ...]:
    """A verification at level run of few tokens."""
    prompts = folder / "prompts.jsonl"
    lines = (FIXTURE.parent / "prompts.jsonl").read_text().splitlines()
    prompts.write_text("\n".join(lines[:3]))
    decoding = ("--prompts", prompts, "--max-new-tokens", 16, "--k", "1,2")
    return ("verify", FEW_LAYERS, "--source", FEW_LAYERS, *decoding)


@pytest.fixture(scope="module")
def seen(words: tuple[object, ...], folder: Path) -> Seen:
    return in_terminal(*words, *REPORTS, folder=folder)


@pytest.mark.timeout(600)
def test_every_check_that_decodes_has_its_bar(seen: Seen) -> None:
    assert seen.code == 0, seen.text
    titles = {found[1] for state in seen.states if (found := BAR.fullmatch(state.rstrip()))}
    assert {title for title in titles if title.startswith("Loading ")} == {
        f"Loading {FEW_LAYERS.name}"
    }
    for name in (*DECODING, "golden file"):
        assert any(re.match(rf"{name}\b", title) for title in titles), (name, titles)


@pytest.mark.timeout(600)
def test_bars_fit_the_terminal_and_leave_nothing_behind(seen: Seen) -> None:
    assert seen.wider_than(80) == []
    page = seen.text.partition("Verification of")[0]
    lines = [line.partition(":")[0] for line in page.splitlines() if line]
    assert lines[-len(DECODING) :] == DECODING, page


@pytest.mark.timeout(600)
def test_a_load_is_shown_by_bytes_on_a_terminal_alone() -> None:
    generate = ("generate", FEW_LAYERS, "def read(", "--max-new-tokens", 4)
    found = map(BAR.match, in_terminal(*generate).states)
    assert {bar.groups()[:2] for bar in found if bar} == {(f"Loading {FEW_LAYERS.name}", "3.04MB")}
    piped = in_pipe(*generate)
    told = [line for line in piped.lines if "Loading" in line]  # of a machine that is busy
    assert "\r" not in piped.raw
    assert all(re.fullmatch(r"Loading \S+: \d+%, \S+ of 3.04MB, .* left", line) for line in told)
    assert "Loading glm4" not in in_terminal(*generate, "--quiet").text


@pytest.mark.timeout(600)
def test_every_file_that_was_written_is_named_at_the_end(seen: Seen, folder: Path) -> None:
    assert seen.lines[-1] == "Report: r.json, r.md, g.jsonl"
    assert all((folder / name).stat().st_size for name in ("r.json", "r.md", "g.jsonl"))


@pytest.mark.timeout(600)
def test_a_line_says_what_is_done_where_there_is_no_bar(seen: Seen) -> None:
    shown = {state.strip() for state in seen.states}
    assert {
        "Opening the checkpoint ...",
        "files ...",
        *(f"{name} ..." for name in DECODING),
    } <= shown


@pytest.mark.parametrize("size", [(0, 0), (80, 0)])
def test_a_terminal_that_knows_no_size_has_bars(size: tuple[int, int], tmp_path: Path) -> None:
    columns, rows = size
    export = ("export", FIXTURE, tmp_path / "out")
    seen = in_terminal(*export, columns=columns, rows=rows)
    assert seen.code == 0 and any(BAR.match(state) for state in seen.states), seen.raw
    assert all(len(state) <= 80 for state in seen.states if BAR.match(state))
