"""The page of a verification in a browser: on a phone too, in the dark too."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mtp_export.verify.check import CheckResult, Item, failed, measured, not_tested, passed
from mtp_export.verify.options import VerifyOptions
from mtp_export.verify.report.html import html_page
from mtp_export.verify.report.report import Report
from serve.browser import FLAWS, PROGRAM, Browser

LONG = "model.layers.61.mlp.experts.255.down_proj.weight_scale_inv" * 3
NAMES = "[...document.querySelectorAll('svg')].map(each => each.getAttribute('aria-label'))"
FITS = "document.documentElement.scrollWidth <= innerWidth"


def checks() -> Iterator[tuple[str, list[Item]]]:
    """Checks with all that the page draws, and failures with their repair."""
    yield "files", [failed("checksums", f"{LONG} has other bytes", repair=f"mtp-export {LONG}")]
    by_layer = [{"layer": layer, "min": 40.0 + layer, "median": 50.0} for layer in range(4)]
    data = {"role": "attention", "storage": "int8_channel", "sqnr_db_by_layer": by_layer}
    yield "weights", [measured("attention", "40 dB", data)]
    share = {"value": 0.7, "low": 0.6, "high": 0.8, "count": 9}
    undone = [
        {"change": f"1 is added to the weights of norm {number}, {LONG}", "gain": share}
        for number in range(8)
    ]
    yield "likelihood", [failed("nothing undone", "it is", data={"undone": undone})]
    yield (
        "acceptance",
        [
            measured(
                f"k=2, draft {position}",
                "0.7",
                {"k": 2, "position": position, "conditional": share, "cumulative": share},
            )
            for position in (1, 2)
        ],
    )
    speed: dict[str, Any] = {"batch": 1, "k": 2, "measured": 1.7, "predicted": 1.6}
    recommended = {"recommended": {"1": {"k": 2, "speedup": 1.7}}}
    yield (
        "speed",
        [
            measured("batch 1, k=2", "1.70x", speed),
            measured("recommended k", "use k=2 (1.70x) at batch 1", recommended),
        ],
    )


def report() -> Report:
    options = VerifyOptions(Path("/models") / LONG)
    tensor_bytes = {"source": 32_000_000, "main": 30_000_000, "mtp": 1_600_000}
    facts: dict[str, Any] = {
        "kind": "bundle",
        "options": {"target": "hf"},
        "source_bytes": 0,
        "parts_bytes": {},
        "tensor_bytes": tensor_bytes,
    }
    results = tuple(
        CheckResult(name=name, title=name, items=(*items, passed("more")), seconds=1.0)
        for name, items in checks()
    )
    launch = {"vllm": f"vllm serve /models/{LONG}/main --speculative-config '{{}}'"}
    return Report(options, facts, results, 1.0, "2026-01-01", f"mtp-export verify {LONG}", launch)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if not PROGRAM:
        pytest.skip("there is no Chromium here")
    with Browser() as one:
        yield one


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everything_can_be_read(scheme: str, width: int, browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text(html_page(report()), encoding="utf-8")
    browser.messages.clear()
    browser.size(width, 800, is_phone=width < 600)
    browser.scheme(scheme)
    browser.open(page.as_uri())
    browser.run("document.querySelectorAll('details').forEach(each => each.open = true)")
    if folder := os.environ.get("PICTURES"):
        browser.picture(Path(folder) / f"report-{scheme}-{width}.png")
    names = browser.run(NAMES)
    assert len(names) == 6 and all(names) and len(set(names)) == 6, names
    assert browser.run(FLAWS) == []
    assert browser.run(FITS)
    top = "document.querySelector('pre').getBoundingClientRect().bottom <= 800"
    assert browser.run(top), "the command that serves it is seen without scrolling"
    assert browser.messages == []
    browser.run("document.querySelector('svg text').style.fill = 'var(--card)'")
    browser.run("document.querySelector('svg').removeAttribute('aria-label')")
    browser.run("document.querySelector('pre').style.whiteSpace = 'pre'")
    browser.run("document.querySelector('pre').style.overflowWrap = 'normal'")
    assert len(browser.run(FLAWS)) == 2 and not browser.run(FITS)  # they can fail


def test_a_page_without_figures_has_no_pictures(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text(html_page(replace(report(), results=(), launch={})), encoding="utf-8")
    browser.open(page.as_uri())
    assert len(browser.run(NAMES)) == 1, "sizes alone"
    assert browser.run("document.querySelector('pre')") is None


def test_a_card_tells_one_cause_with_its_items_below() -> None:
    both = [failed(f"{part}: sizes", f"{part}/a.b is short") for part in ("main", "mtp")]
    other = failed("paths", "<nothing>", repair="mtp-export a")
    checked = [CheckResult(name="files", title="files", items=(*both, other), seconds=1.0)]
    page = html_page(replace(report(), results=tuple(checked))).partition("Every item")[0]
    cards = page.partition("Measured")[0].split('<div class="card" id=')[1:]
    first, second = cards
    assert "files, main: sizes; files, mtp: sizes" in first and "2 items fail for it" in first
    assert first.count("main/a.b is short") == 1 and "mtp/a.b is short" in first
    assert "<details>" not in second
    assert "&lt;nothing&gt;" in second and "To repair:</p><pre>mtp-export a</pre>" in second


def test_every_item_leads_to_the_card_of_its_cause() -> None:
    """Which alone has the words: many items may fail for a cause, and a cause may be long."""
    items = [failed(f"item {n}", LONG, repair="mend it") for n in range(9)]
    skipped = not_tested("skipped", "nothing to compare with")
    checked = (
        CheckResult("files", "files", (failed("other", "b"), *items), 1.0),
        CheckResult("paths", "paths", (passed("c"), skipped), 1.0),
    )
    page = html_page(replace(report(), facts=report().facts | {"options": {}}, results=checked))
    cards, _, table = page.partition("Every item")
    assert cards.count(f"<p>{LONG}</p>") == 1 and cards.count(LONG) == page.count(LONG)
    assert [cards.count(f'id="cause-{n}"') for n in (1, 2, 3)] == [1, 1, 0]
    assert [table.count(f'<a href="#cause-{n}">') for n in (1, 2)] == [1, 9]
    assert "nothing to compare with" in table and "mend it" not in table
