"""Reports of a verification: JSON as documented, JUnit, a self-contained page, exit codes; and the
pipeline of docs/ci.md, command by command."""

from __future__ import annotations

import io
import json
import re
import shlex
import shutil
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from cases import edit_json, export, quantize, read_json, run_program
from faults import planting
from faults.small_model import write_dense, write_fp8, write_row
from mtp_checkpoints.errors import VerificationError
from mtp_export.progress import format_bytes
from mtp_export.verify import CHECKS
from mtp_export.verify.check import CheckResult, Item, Problem, failed, not_tested, passed, verdict
from mtp_export.verify.options import VerifyOptions
from mtp_export.verify.report.html import html_page
from mtp_export.verify.report.junit import junit_xml
from mtp_export.verify.report.reading import read_report
from mtp_export.verify.report.report import Report
from mtp_export.verify.report.report_json import report_json
from mtp_export.verify.report.summary import Summary, markdown
from mtp_export.verify.report.table import ItemTable
from mtp_export.verify.report.verdict import raise_if_failed

ROOT = Path(__file__).resolve().parents[2]
DOCS = (ROOT / "docs/verify.md").read_text()
DOCS_OF_CI = (ROOT / "docs/ci.md").read_text()


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a good bundle, a damaged one, and reports of both."""
    folder = tmp_path_factory.mktemp("reports")
    source = write_fp8(write_dense(folder / "dense"), folder / "source")
    write_row(source, folder / "good", "int8")
    shutil.copytree(folder / "good", folder / "bad")
    planting.flip_a_byte(planting.only_shard(folder / "bad/mtp"), -500)
    for name, code in (("good", 0), ("bad", 7)):
        files = [f"--{kind}={folder / name}.{end}" for kind, end in
                 (("report", "json"), ("junit", "xml"), ("html", "html"))]  # fmt: skip
        outcome = run_program(
            "verify", folder / name, "--source", source, "--level", "weights", *files
        )
        assert outcome.code == code, outcome.err
    return folder


def documented(heading: str, first: str) -> set[str]:
    """The keys in the first column of a table of docs/verify.md."""
    rows = DOCS.split(heading)[1].split(first)[1].split("\n\n")[0].splitlines()
    keys = [row.split("|")[1] for row in rows if row.startswith("| `")]
    return {name for key in keys for name in re.findall(r"`([^`]+)`", key)}


def test_json_is_as_documented(reports: Path) -> None:
    report = read_json(reports / "good.json")
    keys = documented("## JSON", "| key | value |")
    assert set(report) == {key for key in keys if "[" not in key}
    for key in ("machine", "options", "bundle"):
        row = next(line for line in DOCS.splitlines() if line.startswith(f"| `{key}` |"))
        assert set(report[key]) <= set(re.findall(r"`([^`]+)`", row)), key
    for check in report["checks"]:
        assert set(check) == {"name", "title", "status", "seconds", "items"}
        for item in check["items"]:
            assert set(item) == {
                "name",
                "status",
                "figure",
                "bound",
                "subject",
                "cause",
                "repair",
                "data",
            }
            assert item["status"] in ("pass", "fail", "not tested")
            assert item["status"] == "pass" or item["cause"]
    assert report["counts"]["fail"] == 0 and report["causes"] == []
    (cause,) = read_json(reports / "bad.json")["causes"]
    row = next(line for line in DOCS.splitlines() if line.startswith("| `causes` |"))
    assert set(cause) <= set(re.findall(r"`([^`]+)`", row))
    assert {"check": "files", "name": "mtp: checksums"} in cause["items"]
    assert "other bytes than the export wrote" in cause["text"] and len(cause["repairs"]) == 1
    assert {check["name"] for check in report["checks"]} <= set(re.findall(r"`([a-z]+)`", DOCS))


def test_sizes_are_those_that_the_other_commands_print(reports: Path, tmp_path: Path) -> None:
    """Of tensors; only the reports of older bundles count files, and say so."""
    made = run_program("export", "--input-dir", reports / "source", "--output-dir",
                       tmp_path / "own", "--json")  # fmt: skip
    printed = json.loads(made.out)
    words = ("verify", tmp_path / "own", "--level", "files")
    page, report = tmp_path / "own.html", tmp_path / "own.json"
    assert run_program(*words, "--html", page, "--report", report).code == 0
    told = read_json(report)["bundle"]["tensor_bytes"]
    assert told.pop("source") == printed["bytes_before"]
    assert sum(told.values()) == printed["bytes_after"]
    for size in (printed["bytes_before"], *told.values()):
        assert f">{format_bytes(size)}</text>" in page.read_text()
    assert "tensors, without headers of files" in page.read_text()
    edit_json(tmp_path / "own/mtp_export.json", lambda manifest: manifest.pop("sizes"))
    assert run_program(*words, "--html", page, "--report", report).code == 0
    assert "source" not in read_json(report)["bundle"]["tensor_bytes"]
    assert "files, with their headers" in page.read_text()
    assert run_program(*words, "--source", reports / "source", "--report", report).code == 0
    assert read_json(report)["bundle"]["tensor_bytes"]["source"] == printed["bytes_before"]


def test_the_launch_line_is_on_top_with_the_recommended_k(reports: Path) -> None:
    good, bad = (read_json(reports / f"{name}.json") for name in ("good", "bad"))
    assert good["recommended_k"] is None and bad["launch"] == {}
    launched = json.loads(run_program("launch", reports / "good", "--json").out)
    engines = launched.get("engines") or {launched["engine"]: launched}
    assert good["launch"] == {name: own["commands"][0] for name, own in engines.items()}
    page = (reports / "good.html").read_text()
    head = page.partition("<h2>")[0]
    for name, line in good["launch"].items():
        assert f"<b>Serve it with {name}</b>" in head and line in unescape(head)
    assert "Serve it" not in (reports / "bad.html").read_text()
    read = read_report(reports / "good.json")
    assert read.launch == good["launch"]


@pytest.mark.parametrize(
    ("by_batch", "k"),
    [({"1": {"k": 3}, "4": {"k": 2}, "16": {"k": 4}}, 4), ({"1": {"k": 0}}, None), ({}, None)],
)
def test_k_is_recommended_for_the_largest_batch(by_batch: dict[str, Any], k: int | None) -> None:
    report = sample_report(passed("recommended k", data={"recommended": by_batch}))
    assert report.recommended_k == k == report_json(report)["recommended_k"]


def test_levels_above_say_that_they_were_left_out(reports: Path) -> None:
    checks = {check["name"]: check for check in read_json(reports / "good.json")["checks"]}
    assert checks["greedy"]["status"] == "not tested"
    assert "--level weights leaves it out" in checks["greedy"]["items"][0]["cause"]


def test_junit_counts_what_the_report_counts(reports: Path) -> None:
    for name in ("good", "bad"):
        counts = read_json(reports / f"{name}.json")["counts"]
        suites = ElementTree.parse(reports / f"{name}.xml").getroot()
        assert int(suites.attrib["failures"]) == counts["fail"] == len(suites.findall(".//failure"))
        assert len(suites.findall(".//skipped")) == counts["not tested"]
        assert len(suites.findall(".//testcase")) == sum(counts.values())
    failure = suites.find(".//failure")
    assert failure is not None and "other bytes than the export wrote" in failure.attrib["message"]


class Page(HTMLParser):
    """Collect what a page would load, and pair its tags."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [str(value) for key, value in attrs if key in ("src", "href", "xlink:href")]
        if tag in ("script", "link", "img", "iframe"):
            self.loads.append(tag)
        if tag not in ("meta", "line", "circle", "rect", "polyline"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("line", "circle", "rect", "polyline"):
            assert self.open.pop() == tag


def test_the_page_needs_nothing_else(reports: Path) -> None:
    for name, words in (("good", "Verified:"), ("bad", "NOT verified:")):
        text = (reports / f"{name}.html").read_text()
        page = Page()
        page.feed(text)
        assert all(place.startswith("#cause-") for place in page.loads) and page.open == []
        assert bool(page.loads) == (name == "bad")
        assert "url(" not in text and "@import" not in text
        assert words in text
        assert "Signal to quantization noise" in text and "Size before and after" in text


def sample_report(*items: Item) -> Report:
    options = VerifyOptions(Path("bundle"))
    facts: dict[str, Any] = {"options": {}, "source_bytes": 0, "parts_bytes": {}}
    results = (CheckResult(name="acceptance", title="Acceptance", items=items, seconds=1.0),)
    return Report(options=options, facts={"kind": "bundle"} | facts, results=results, seconds=1.0)


def test_the_page_draws_acceptance_and_escapes_names() -> None:
    share = {"value": 0.7, "low": 0.6, "high": 0.8, "count": 9}
    data = {"k": 1, "position": 1, "conditional": share, "cumulative": share}
    page = html_page(sample_report(passed("<b>&", data=data)))
    assert "k=1, draft 1" in page and "70.0%" in page
    assert "<b>" not in page and "&lt;b&gt;&amp;" in page


def lines_of(report: Report, width: int = 80) -> list[str]:
    """Lines of the page."""
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(Summary(report))
    return console.export_text().splitlines()


def figures_report(advice: Item, *, prompts: int = 2) -> Report:
    """A report of two drafts per step, and of what check `speed` says of them."""
    ends = (-0.05, 0.05) if prompts > 1 else ()
    shares: list[dict[str, float | None]] = [
        {"value": v, "low": None, "high": None, "count": 9}
        | dict(zip(("low", "high"), (v + end for end in ends), strict=False))
        for v in (0.9, 0.7)
    ]
    length = {"value": 2.6, "low": 2.5, "high": 2.7, "count": 9}
    drafts = [
        passed(f"k=2, draft {place}", data={"k": 2, "position": place, "cumulative": share})
        for place, share in enumerate(shares, start=1)
    ]
    ended = passed("k=2, mean accepted length", data={"k": 2, "accepted_length": length})
    report = sample_report(*drafts, ended)
    speed = CheckResult("speed", "Speed", (advice,), 1.0)
    return replace(report, results=(*report.results, speed))


def test_the_page_has_acceptance_and_the_number_of_drafts() -> None:
    advice = "use k=2 (1.40x) at batch 1; this machine is too busy to tell of batch 4 with k=2"
    report = figures_report(passed("recommended k", figure=advice, data={"recommended": {}}))
    page, text = lines_of(report, width=120), markdown(report).replace("\\", "")
    accepted = "k=2: 90 % [85, 95], 70 % [65, 75]; 2.60 tokens per step"
    assert f"  {accepted}" in page and f"\n- {accepted}\n" in text
    assert f"Number of drafts: {advice}" in page and f"\nNumber of drafts: {advice}\n" in text
    busy = figures_report(not_tested("recommended k", "this machine is too busy to tell"))
    told = "not tested: speed, recommended k: this machine is too busy to tell"
    assert told in lines_of(busy) and not any("Number of" in line for line in lines_of(busy))
    assert "Drafts accepted" not in " ".join(lines_of(sample_report(passed("other"))))


def test_a_single_prompt_has_no_interval() -> None:
    advice = passed("recommended k", figure="use none", data={"recommended": {}})
    several, one = (lines_of(figures_report(advice, prompts=prompts)) for prompts in (2, 1))
    assert "Drafts accepted, by position (with 95 % intervals):" in several
    title = "Drafts accepted, by position (of one prompt, which has no interval):"
    assert one[one.index(title) + 1] == "  k=2: 90 %, 70 %; 2.60 tokens per step"


def test_checks_stand_in_columns_where_there_is_room() -> None:
    items = [passed("one"), not_tested("two", "no reason")]
    report = sample_report(*items)
    assert "acceptance    1 pass, 1 not tested     1.0 s" in lines_of(report)
    assert "acceptance: 1 pass, 1 not tested, 1.0 s" in lines_of(report, width=42)


def test_the_table_fits_100_columns() -> None:
    long = failed("n" * 80, "c" * 80, figure="f" * 80, bound="b" * 80, subject="s" * 80)
    console = Console(width=140, file=io.StringIO(), record=True)
    console.print(ItemTable(sample_report(long)))
    table = [line for line in console.export_text().splitlines() if line[:1] in "┃│├└┏┡"]
    assert table and max(map(len, table)) <= 100


def texts_of(report: Report) -> dict[str, str]:
    """The texts for people and CI systems."""
    console = Console(width=140, file=io.StringIO(), record=True)
    console.print(Summary(report))
    with pytest.raises(VerificationError) as failure:
        raise_if_failed(report)
    return {
        "summary": console.export_text(),
        "markdown": markdown(report).replace("\\", ""),
        "page": html_page(report),
        "junit": junit_xml(report),
        "message": str(failure.value),
    }


def test_a_report_of_thousands_of_problems_is_short() -> None:
    """As of a checkpoint whose every tensor is wrong: the first are named and the rest counted; the
    JSON alone lists them all."""
    few, many = 5, 90_000
    texts = []
    for count in (few, many):
        problems = [Problem(f"tensor {n:05}", f"tensor {n:05} is wrong") for n in range(count)]
        report = sample_report(verdict("tensors", problems, figure=f"{count:,}"))
        (check,) = report_json(report)["checks"]
        listed = check["items"][0]["data"]["problems"]
        assert [one["subject"] for one in listed] == [problem.subject for problem in problems]
        texts.append(texts_of(report))
    for kind in texts[0]:
        short, long = texts[0][kind], texts[1][kind]
        assert "tensor 00002" in long and "tensor 00005" not in long
        said_once = kind in {"summary", "markdown", "page"}
        assert f"and {89_996 if said_once else 89_995:,} more" in " ".join(long.split()), kind
        assert len(long) < len(short) + 500, kind


def test_a_problem_of_any_length_is_clipped() -> None:
    name = "n" * 1_000_000
    report = sample_report(verdict("tensors", [Problem(name, f"{name} is wrong")] * 3))
    for kind, text in texts_of(report).items():
        assert len(text) < 20_000, kind


def test_a_message_of_thousands_of_failed_items_is_short() -> None:
    alike = [failed(f"item {n}", "c" * 5000, figure="f" * 5000) for n in range(3000)]
    first, one = message_of(alike)
    assert "3000 of 3000 items" in first and "Found 1 cause." in first and len(one) < 1000
    assert one.startswith("- acceptance, item 0; acceptance, item 1; acceptance, item 2; and 2,997")
    each = [failed(f"item {n}", f"{n} c\n" * 5000, figure="f" * 5000) for n in range(3000)]
    lines = message_of(each)
    assert len(lines) == 7 and all(len(line) < 1000 for line in lines)
    assert lines[-1] == "and 2,995 more causes: --html FILE.html shows each"


def message_of(items: list[Item]) -> list[str]:
    """The lines of the error that a report of failed items ends a command with."""
    with pytest.raises(VerificationError) as failure:
        raise_if_failed(sample_report(*items))
    return str(failure.value).splitlines()


def test_junit_says_with_each_failure_what_else_fails_for_it_and_what_mends_it() -> None:
    alike = [failed("one", "c"), failed("two", "c", figure="3", repair="mend it")]
    suites = ElementTree.fromstring(junit_xml(sample_report(*alike, failed("three", "d"))))
    texts = [failure.text for failure in suites.findall(".//failure")]
    cause = "2 items fail for one cause: acceptance, one; acceptance, two: c"
    mended = f"{cause}\nTo repair:\nmend it"
    assert texts == [f"c\n{mended}", f"3\nc\n{mended}", "d"]


def test_no_bundle_and_odd_options_are_usage_or_input_errors(reports: Path, tmp_path: Path) -> None:
    assert run_program("verify", tmp_path).code == 3
    assert run_program("verify", tmp_path / "nowhere").code == 3
    for options in (["--k", "0"], ["--k", "1,x"], ["--html", str(reports / "good/main/r.html")]):
        assert run_program("verify", reports / "good", *options).code == 2, options
    missing = ["--source", str(tmp_path / "nowhere")]
    assert run_program("verify", reports / "good", *missing).code == 3


def test_no_checksums_says_so(reports: Path) -> None:
    outcome = run_program(
        "verify", reports / "bad", "--level", "files", "--no-checksums", "--json", "--quiet"
    )
    assert outcome.code == 0
    assert "--no-checksums leaves them out" in outcome.out


def test_linked_shards_are_not_called_tested(reports: Path, tmp_path: Path) -> None:
    arguments = ["--input-dir", reports / "source", "--output-dir", tmp_path / "linked", "--quiet"]
    assert run_program(*arguments, "--link", "hardlink").code == 0
    outcome = run_program("verify", tmp_path / "linked", "--level", "files", "--json", "--quiet")
    items = json.loads(outcome.out)["checks"][0]["items"]
    linked = [item for item in items if item["name"] == "main: checksums of linked shards"]
    assert outcome.code == 0
    assert linked[0]["status"] == "not tested" and "--checksums all" in linked[0]["cause"]


def test_linked_shards_are_compared_with_the_source(reports: Path, tmp_path: Path) -> None:
    """From level weights on, so that nothing lacks for --strict."""
    source, linked = tmp_path / "source", tmp_path / "linked"
    shutil.copytree(reports / "source", source)
    assert export(source, linked, "--link", "hardlink", "--quiet").code == 0
    options = ("--source", source, "--level", "weights", "--quiet", "--strict")
    outcome = run_program("verify", linked, *options)
    assert outcome.code == 0, outcome.err
    without = run_program("verify", linked, "--level", "weights", "--json", "--quiet")
    assert "--source compares their bytes from level weights on" in without.out


def test_a_failed_job_logs_what_the_ci_page_shows(
    trained_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fixtures").symlink_to(ROOT / "fixtures")
    monkeypatch.chdir(tmp_path)
    schemes = ("--base-quant", "weight_only_int8", "--mtp-quant", "weight_only_int8", "--quiet")
    assert quantize(trained_bundle, Path("release"), *schemes).code == 0
    edit_json(Path("release/main/config.json"), lambda config: config.update(rope_theta=123.0))
    planting.flip_a_byte(planting.only_shard(Path("release/mtp")), -500)
    source = ("--source", "fixtures/deepseek-v3-tiny", "--level", "weights")
    outcome = run_program("verify", "release", *source, "--quiet")
    shown = re.search(r"```\n(mtp-export: error: .*?)```", DOCS_OF_CI, re.S)
    assert shown is not None and (outcome.code, outcome.err) == (7, shown[1])


@pytest.mark.nightly  # a demo of every push runs the same checks
@pytest.mark.timeout(900)  # a whole run of a whole model
def test_the_pipeline_of_the_ci_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = re.search(r"CHECKPOINT: (\S+)", DOCS_OF_CI)
    commands = re.findall(r"run: (mtp-export .*)", DOCS_OF_CI)
    assert checkpoint is not None and len(commands) == 4
    (tmp_path / "fixtures").symlink_to(ROOT / "fixtures")
    monkeypatch.chdir(tmp_path)
    places = {"$CHECKPOINT": checkpoint[1], "$GITHUB_STEP_SUMMARY": "summary.md"}
    for command in commands:
        arguments = [places.get(word, word) for word in shlex.split(command)[1:]]
        outcome = run_program(*arguments)
        assert outcome.code == 0, outcome.err
    report = read_json(tmp_path / "verify.json")
    ran = {check["name"] for check in report["checks"] if check["status"] == "pass"}
    assert ran == set(CHECKS) - {"stream"}
    assert (tmp_path / "summary.md").read_text().startswith("### Verification of release: passed")
    kept = re.findall(r"^ {12}(\S+)$", DOCS_OF_CI.split("path: |")[1].split("- name")[0], re.M)
    for pattern in kept:
        assert list(tmp_path.glob(pattern)), pattern
