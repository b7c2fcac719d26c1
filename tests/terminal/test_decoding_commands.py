"""generate, serve and export as people see them: terminals of two sizes, no colours, a pipe."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cases import edit_json, export, nightly_but
from terminal.screen import Terminal, in_pipe, in_terminal

FIXTURE = Path(__file__).resolve().parents[2] / "fixtures/glm4-moe-tiny"  # of few layers
GENERATE = ("generate", FIXTURE, "--prompt", "def read(", "--max-new-tokens", "24")
DRAFTED = (*GENERATE, "--speculate-max-draft-token-num", "2")
FIGURES = re.compile(r"\d+ tokens( in |, )")  # the first line of them
UNDERLINED, BOLD = "\x1b[4", "\x1b[1m"
# Colours, as escapes set them; styles without a colour are no colours.
COLOUR = re.compile(r"\x1b\[(?:\d+;)*(?:3[0-7]|9[0-7]|38|48|4[0-7])(?:;\d+)*m")


def test_generate_on_a_terminal() -> None:
    seen = in_terminal(*DRAFTED)
    assert seen.code == 0 and all(len(line) <= 80 for line in seen.lines[-12:])
    first = next(number for number, line in enumerate(seen.lines) if "def read(" in line)
    assert seen.lines[first].startswith("def read(self):")
    rates = next(line for line in seen.lines if FIGURES.match(line))
    told = r" in [\d.]+ s: [\d.]+ tokens/s"
    told = "" if "too busy to tell rates" in seen.text else told
    assert re.fullmatch(rf"24 tokens{told}, [\d.]+ tokens per step \(plain: 1\)", rates)
    bars = next(line for line in seen.lines if line.startswith("draft 1"))
    assert re.search(r"draft 1 █.* % \(\d+ of \d+\)   draft 2 █.* % \(\d+ of \d+\)", bars)
    assert any(escape.startswith(UNDERLINED) for escape in seen.escapes)
    assert BOLD not in seen.escapes
    assert re.search(r"Loading glm4-moe-tiny: .* of 3\.04MB, .* left", seen.raw)


def test_generate_without_colours_on_a_narrow_terminal() -> None:
    environment = {"NO_COLOR": "1"}
    seen = in_terminal(*DRAFTED, columns=40, rows=20, environment=environment)
    figures = seen.lines[next(i for i, each in enumerate(seen.lines) if FIGURES.match(each)) :]
    assert seen.code == 0 and all(len(line) <= 40 for line in figures)
    assert sum(line.startswith("draft ") for line in figures) == 2  # a line each
    assert "\x1b[4m" in seen.escapes and not COLOUR.search(seen.raw)


@pytest.mark.parametrize("place", ["pipe", "dumb"])
def test_generate_writes_no_escapes_where_none_belong(place: str) -> None:
    dumb = {"TERM": "dumb"}
    seen = in_pipe(*DRAFTED) if place == "pipe" else in_terminal(*DRAFTED, environment=dumb)
    assert seen.code == 0
    if place == "pipe":
        assert seen.escapes == []
        assert any(line.startswith("self):") for line in seen.lines)
    else:
        assert not COLOUR.search(seen.raw) and UNDERLINED not in seen.raw
    assert "tokens per step (plain: 1)" in seen.text


@pytest.mark.parametrize("columns", nightly_but([40], [80, 40]))
def test_what_is_logged_is_wrapped_between_words(columns: int, tmp_path: Path) -> None:
    """As of a module that config.json announces and that is lost."""
    main = tmp_path / "bundle" / "main"
    assert export(FIXTURE, main.parent, "--quiet").code == 0
    edit_json(main / "config.json", lambda config: config.update(num_nextn_predict_layers=1))
    generate = ("generate", "bundle/main", "a", "--max-new-tokens", 2)
    seen = in_terminal(*generate, columns=columns, rows=20, folder=tmp_path)
    assert seen.code == 0 and seen.wider_than(columns) == []
    announced = "config.json announces an MTP layer, and there is none. See"
    assert f"{announced} mtp-export verify" in " ".join(seen.lines)
    assert any(announced in line for line in in_pipe(*generate, folder=tmp_path).lines)


def test_several_texts_are_not_bold() -> None:
    seen = in_terminal(*GENERATE, "--prompt", "a b")
    assert seen.code == 0 and seen.raw.count(BOLD) == 2
    assert f"{BOLD}[1] \x1b[0m" in seen.raw and f"{BOLD}[2] \x1b[0m" in seen.raw


def test_serve_says_where_it_is_and_ends_by_ctrl_c() -> None:
    with Terminal("serve", FIXTURE, "--port", "0") as terminal:
        terminal.wait_for("Ctrl-C stops it.")
        terminal.press("\x03")
        seen = terminal.finish()
    assert seen.code == 0
    banner = [line for line in seen.lines if re.match(r"(Page|API|Metrics|Try) ", line)]
    assert [line.split()[0] for line in banner] == ["Page", "API", "Metrics", "Try"]
    assert all(len(line) <= 80 for line in seen.lines[-12:])
    assert seen.lines[-1] == "Stopped: 0 requests served."


def test_ctrl_c_while_generate_streams() -> None:
    words = ("generate", FIXTURE, "--prompt", "def read(", "--max-new-tokens", "3000")
    with Terminal(*words) as terminal:
        terminal.wait_for("def read(self")
        terminal.press("\x03")
        seen = terminal.finish()
    assert seen.code == 130 and seen.lines[-1] == "mtp-export: Interrupted."
    assert any(FIGURES.match(line) for line in seen.lines)


@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (40, 20)])
def test_an_export_ends_with_the_next_steps(
    columns: int, rows: int, pristine: Path, tmp_path: Path
) -> None:
    """Commands can be copied, however narrow the terminal."""
    output = tmp_path / "bundle"
    words = ("--input-dir", pristine, "--output-dir", output)
    seen = in_terminal(*words, columns=columns, rows=rows)
    assert seen.code == 0
    lines = seen.as_a_shell_reads.splitlines()
    last = next(i for i, line in enumerate(lines) if line.startswith("Check it:"))
    assert lines[last] == (
        f"Check it:  mtp-export verify {output} --source {pristine} --level weights"
    )
    assert [line.split()[0] for line in lines[last + 1 : last + 2]] == ["Try"]
