"""Changes that were undone to explain a failure, as reports show them."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from mtp_export.verify.check import CheckResult, failed, passed
from mtp_export.verify.diagnosis.causes.decoding import one_of
from mtp_export.verify.diagnosis.undone import MOST_UNDONE, undone
from mtp_export.verify.evidence.statistics import Estimate
from mtp_export.verify.options import VerifyOptions
from mtp_export.verify.report.charts import charts
from mtp_export.verify.report.html import html_page
from mtp_export.verify.report.report import Report
from mtp_export.verify.report.table import ItemTable

GAINS = {
    "a norm is shifted": Estimate(0.5, 0.4, 0.6, 90),
    "nothing <else> is": Estimate(-2.0, -2.5, -1.5, 90),
    "halves are exchanged, of a matrix whose name is as long as names are": Estimate(
        2.361, 2.2, 2.5, 90
    ),
    "of one prompt": Estimate(0.0312, None, None, 90),
}


@pytest.fixture
def report() -> Report:
    item = failed("none drafts better", "it does", data=undone(GAINS.items()))
    other = passed("other", data=undone(GAINS.items()))
    result = CheckResult("acceptance", "Acceptance", (other, item), 1.0)
    facts = {"kind": "bundle", "options": {}, "source_bytes": 0, "parts_bytes": {}}
    return Report(VerifyOptions(), facts, (result,), 1.0)


def test_the_best_come_first_and_no_more_than_a_chart_holds() -> None:
    rows = undone((f"change {n}", Estimate(n / 7, 0.0, 1.0, 9)) for n in range(20))["undone"]
    assert [row["change"] for row in rows] == [f"change {n}" for n in range(19, 11, -1)]
    assert len(rows) == MOST_UNDONE and rows[0]["gain"]["value"] == pytest.approx(19 / 7)


def test_a_change_comes_once_and_those_that_are_named_come_at_all() -> None:
    gains = [(f"change {n}", Estimate(n / 7, 0.0, 1.0, 9)) for n in range(20)]
    named = [("change 1", Estimate(0.5, 0.4, 0.6, 99)), ("change 19", Estimate(9.0, 8.0, 9.9, 99))]
    rows = undone(reversed([("change 18", gains[2][1]), *gains]), named=named)["undone"]
    shown = [(int(row["change"].split()[1]), row["gain"]["value"]) for row in rows]
    others = [(n, pytest.approx(n / 7)) for n in range(18, 12, -1)]
    assert shown == [(19, 9.0), *others, (1, 0.5)]


def test_the_page_has_a_bar_for_each(report: Report) -> None:
    (chart,) = charts(report)
    assert chart.title.startswith("Check acceptance: gain in nats per token")
    labels = re.findall(r'<text class=""[^>]*>([^<]*)<', chart.svg)
    assert labels == [
        "halves are exchanged, of a matrix whose name is as",
        "long as names are",
        "a norm is shifted",
        "of one prompt",
        "nothing &lt;else&gt; is",
    ]
    values = re.findall(r'<text class="strong"[^>]*>([^<]*)<', chart.svg)
    assert values == ["2.36 [2.20, 2.50]", "0.50 [0.40, 0.60]", "0.031", "-2.00 [-2.50, -1.50]"]
    widths = [float(width) for width in re.findall(r'<rect[^>]* width="([0-9.]+)"', chart.svg)]
    assert widths == sorted(widths, reverse=True) and widths[-1] == 1.0
    whole = re.findall(r"<rect[^>]*><title>([^<]*)<", chart.svg)
    assert whole[0] == "halves are exchanged, of a matrix whose name is as long as names are"
    assert widths[1] / widths[0] == pytest.approx(0.5 / 2.361, rel=0.01)
    assert chart.svg in html_page(report)


@pytest.mark.parametrize("width", [120, 50])
def test_verbose_has_a_line_for_each(report: Report, width: int) -> None:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(ItemTable(report))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= width
    text = " ".join(line.strip() for line in lines)
    assert "acceptance, none drafts better: gain in nats per token, best first, when" in text
    assert text.count("2.36 [2.20, 2.50]: halves are exchanged") == 1, "of the failure alone"
    assert text.index("0.50 [0.40, 0.60]: a norm") < text.index("0.031: of one prompt")


def test_several_explain_it_equally() -> None:
    assert one_of(["a"]) == "a"
    assert one_of(["a", "b"]) == "several explain it equally: a; or b"
    assert one_of([*"abcde"]) == "several explain it equally: a; or b; or c; or 2 more"
