"""The page of a verification as people see it: on terminals of two sizes, without colour, in
a pipe."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest

from cases import nightly_but, run_program
from faults import planting
from faults.weight_faults import region_lost
from mtp_export.bundle.journal import Journal
from terminal.screen import Seen, in_pipe, in_terminal

FILES = ("--level", "files")


@pytest.fixture(scope="module")
def folder(
    row_bundle: Callable[[str, str], Path],
    row_sources: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A folder with a good bundle, a damaged one, and the source of both."""
    folder = tmp_path_factory.mktemp("page")
    for name in ("good", "bad"):
        shutil.copytree(row_bundle("int8", "fp8"), folder / name)
    planting.flip_a_byte(sorted((folder / "bad/mtp").glob("*.safetensors"))[0], -500)
    (folder / "source").symlink_to(row_sources["fp8"])
    return folder


@pytest.mark.parametrize("columns", [80, 40])
@pytest.mark.parametrize("name", ["good", "bad"])
def test_no_line_is_wider_than_the_terminal(folder: Path, name: str, columns: int) -> None:
    for options in ([], ["--verbose"]):
        seen = in_terminal(
            "verify", name, *FILES, *options, columns=columns, rows=20, folder=folder
        )
        page = Seen(seen.code, seen.raw.partition("mtp-export: ")[0])
        assert page.wider_than(columns) == []
        assert "\x1b[" in seen.raw


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_terminals_without_colour_get_none(folder: Path, environment: dict[str, str]) -> None:
    seen = in_terminal("verify", "bad", *FILES, environment=environment, folder=folder)
    assert not any(";3" in escape or "[3" in escape for escape in seen.escapes)
    assert "Verification of bad: FAILED" in seen.lines


def test_a_pipe_gets_plain_lines(folder: Path) -> None:
    seen = in_pipe("verify", "good", *FILES, folder=folder)
    assert seen.escapes == [] and "\r" not in seen.raw
    assert (
        "Verification of good: no fault in headers and configs; 11 of 12 checks not run"
        in seen.lines
    )
    assert seen.wider_than(80) == []


def test_level_weights_says_so_and_names_the_next_step(folder: Path) -> None:
    options = ("--source", "source", "--level", "weights", "--report", "r.json", "--html", "r.html")
    seen = in_pipe("verify", "good", *options, folder=folder)
    assert seen.code == 0
    verdict = "Verification of good: no fault in files and weights; 9 of 12 checks not run"
    assert verdict in seen.lines
    assert "  mtp-export push good ORG/NAME --report r.json" in seen.lines
    assert seen.lines[-1] == "Report: r.html, r.json"
    (weights,) = (line for line in seen.lines if line.startswith("weights  "))
    assert weights.split()[2] == "pass" or weights.split()[2] == "pass,"
    assert weights.endswith(" s")


def test_a_failure_is_told_once_with_its_repair(folder: Path) -> None:
    """Which makes the bundle whole again, as it is printed."""
    seen = in_pipe("verify", "bad", "--source", "source", *FILES, folder=folder)
    assert seen.code == 7
    assert seen.text.count("has other bytes") == 1
    assert "Verified" not in seen.text
    start = seen.lines.index("To repair:") + 1
    end = next(n for n in range(start, len(seen.lines)) if not seen.lines[n].endswith("\\"))
    command = " ".join(line.rstrip("\\") for line in seen.lines[start : end + 1])
    words = shlex.split(command)
    assert words[:2] == ["mtp-export", "quantize"] and words[-1] == "--overwrite"
    mended = folder / "mended"
    shutil.copytree(folder / "bad", mended)
    places = {"source": folder / "source", "bad": mended}
    assert run_program(*(places.get(word, word) for word in words[1:])).code == 0
    assert run_program("verify", mended, *FILES, "--quiet").code == 0


def test_damage_after_the_export_is_one_failure(folder: Path) -> None:
    """Though both its checksum and the main model's identity tell it."""
    shutil.copytree(folder / "good", folder / "byte")
    main = folder / "byte/main"
    planting.flip_a_byte(main / planting.weight_map(main)["model.norm.weight"], -500)
    options = ("--source", "source", "--level", "weights")
    seen = in_pipe("verify", "byte", *options, folder=folder)
    start = seen.lines.index("Verification of byte: FAILED")
    told = " ".join(line.strip() for line in seen.lines[start + 1 : seen.lines.index("To repair:")])
    names = "files, main: checksums; files, main: the model that was exported: "
    assert told.strip().startswith(names) and told.count("files, ") == 2, seen.text
    assert told.endswith("damaged or replaced since")


def test_a_damaged_head_is_one_failure(folder: Path) -> None:
    """And no draft of another model, nor a line of the loader about it."""
    shutil.copytree(folder / "good", folder / "head")
    planting.change(folder / "head/main", "lm_head.weight", region_lost)
    options = ("--level", "weights")
    seen = in_pipe("verify", "head", "--source", "source", *options, folder=folder)
    assert seen.code == 7 and "differs from" not in seen.text and "R1" not in seen.text
    said = " ".join(seen.text.split())
    assert said.count("lm_head.weight is not the source's: 300 of its") == 1
    alone = run_program("verify", folder / "head", *options)
    assert "lm_head.weight is damaged (" in " ".join(alone.out.split())


def test_an_unfinished_bundle_is_one_failure(folder: Path) -> None:
    unfinished = folder / "unfinished"
    shutil.copytree(folder / "good", unfinished)
    manifest = json.loads((unfinished / "mtp_export.json").read_text())
    (unfinished / "mtp_export.json").unlink()
    files = {f"{part}/{name}" for part in ("main", "mtp") for name in ("a.safetensors", "b.json")}
    with Journal(unfinished) as journal:
        identity = {"options": manifest["options"]}
        journal.begin(identity, files, ("quantize", "--input-dir", "source", "--part", "main"))
    seen = in_pipe("verify", "unfinished", *FILES, folder=folder)
    assert seen.code == 7
    assert "unfinished is unfinished (0 of 2 shards)" in " ".join(seen.lines)
    assert "1 fail" in seen.text and "pass" not in seen.text
    start = seen.lines.index("To finish it:")
    command = "  mtp-export quantize --input-dir source --part main --output-dir unfinished"
    assert seen.lines[start + 1] == command


def test_strict_fails_on_what_could_not_be_tested(folder: Path) -> None:
    strict = ("--quiet", "--strict")
    assert run_program("verify", folder / "good", *FILES, *strict).code == 0
    outcome = run_program("verify", folder / "good", *FILES, *strict, "--no-checksums")
    assert outcome.code == 7
    assert "--no-checksums leaves" in outcome.err


def test_with_json_stdout_has_one_object_whatever_happens(folder: Path) -> None:
    nowhere = run_program("verify", folder / "nowhere", "--json")
    error = json.loads(nowhere.out)["error"]
    assert (nowhere.code, error["exit_code"]) == (3, 3)
    assert error["message"] in nowhere.err
    assert "error" in json.loads(run_program("verify", folder, "--json", "--no-such").out)
    failed = run_program("verify", folder / "bad", *FILES, "--json")
    assert failed.code == 7 and json.loads(failed.out)["status"] == "fail"


def test_the_summary_is_markdown(folder: Path) -> None:
    place = folder / "summary.md"
    failed = run_program("verify", folder / "bad", *FILES, "--summary", place)
    assert failed.code == 7 and failed.out.splitlines()[-1] == f"Report: {place}"
    text = place.read_text()
    assert text.startswith("### Verification of ") and ": FAILED\n" in text
    assert "| files | " in text and "```\nmtp-export quantize " in text


@pytest.mark.parametrize("columns", nightly_but([40], [80, 40]))
def test_decoding_shows_how_far_it_is(folder: Path, columns: int) -> None:
    options = ("--max-new-tokens", 8, "--k", 1)
    seen = in_terminal("verify", "good", *options, columns=columns, folder=folder)
    page = Seen(seen.code, seen.raw.partition("mtp-export: ")[0])
    assert page.wider_than(columns) == []
    first = "" if columns == 80 else r" *\d+%, \S+ left: "  # where it is narrow
    for title in ("greedy, with every", "decoding with k=1", "speed at batch 1"):
        assert any(re.match(first + title, state) for state in seen.states), title
    assert not any(line.startswith("greedy, with every") for line in seen.lines)
    row = r"acceptance +\d+ pass.* \d+\.\d s" if columns == 80 else r"acceptance: \d+ pass.*"
    assert any(re.fullmatch(row, line) for line in seen.lines)
    assert any(re.match(r"  k=1: \d+ %", line) for line in seen.lines)


def test_reports_say_when_and_how_they_were_made(folder: Path) -> None:
    options = ("--report", "dated.json", "--html", "dated.html")
    seen = in_pipe("verify", "good", *FILES, *options, folder=folder)
    assert seen.code == 0
    report = json.loads((folder / "dated.json").read_text())
    command = "mtp-export verify good --level files --report dated.json --html dated.html"
    assert report["command"] == command
    assert datetime.fromisoformat(report["date"]).tzinfo is not None
    page = (folder / "dated.html").read_text()
    assert report["date"] in page and command in page
    assert page.count("<svg") == page.count("aria-label=") > 0
