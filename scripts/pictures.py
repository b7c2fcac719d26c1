"""Make the pictures of the README from the real program: the server's page after a comparison with
plain decoding, and the acceptance that a verification measured.

    python scripts/pictures.py report.json

report.json is of `mtp-export verify fixtures/deepseek-v3-tiny --level run --report report.json`.
Needs Chromium, and a machine that is idle, as figures are in the pictures.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / folder) for folder in ("tests", "runtime", "checkpoints", "kernels", "")]

from mtp_export.verify.report.charts import charts  # noqa: E402
from mtp_export.verify.report.plots import standalone  # noqa: E402
from mtp_export.verify.report.reading import read_report  # noqa: E402
from mtp_runtime import LLM  # noqa: E402
from serve.browser import Browser  # noqa: E402
from serve.running import running  # noqa: E402

FIXTURE = ROOT / "fixtures/deepseek-v3-tiny"
FOLDER = ROOT / "docs/pictures"
CHART = "acceptance-cumulative"
COMPARED = """new Promise(done => setInterval(() => {
  if (/plain decoding|too busy/.test(document.getElementById("note").textContent)) done();
}, 50))"""
SHOWN = """new Promise(done => setInterval(() => {
  if (!document.getElementById("compare").hidden) done();
}, 50))"""


def picture_of_acceptance(browser: Browser, report: Path, path: Path) -> None:
    """Draw the chart of a report with its title."""
    chart = next(chart for chart in charts(read_report(report)) if chart.name == CHART)
    text = (
        '<!doctype html><meta charset="utf-8"><body style="margin:16px;font:15px sans-serif">'
        f"<b>{escape(chart.title)}</b>{standalone(chart.svg, chart.labels)}</body>"
    )
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "chart.html"
        page.write_text(text, encoding="utf-8")
        browser.size(680, 200, is_phone=False)
        browser.open(page.as_uri())
        browser.picture(path)


def picture_of_page(browser: Browser, path: Path) -> str:
    """Compare with plain decoding on the server's page; return what it says of the gain."""
    llm = LLM(FIXTURE, speculate_method="mtp", speculate_max_draft_token_num=2)
    llm.warm_up()
    with running(llm, model_name="deepseek-v3-tiny") as server:
        browser.size(960, 640, is_phone=False)
        browser.open(server.url)
        browser.run(SHOWN)
        browser.run("document.getElementById('tokens').value = '48'")
        browser.run("document.getElementById('compare').click()")
        browser.run(COMPARED)
        browser.run("new Promise(done => setTimeout(done, 1500))")  # figures come every second
        browser.picture(path)
        return str(browser.run("document.getElementById('note').textContent"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("report", type=Path)
    report = parser.parse_args().report
    FOLDER.mkdir(exist_ok=True)
    with Browser() as browser:
        browser.scheme("light")
        picture_of_acceptance(browser, report, FOLDER / "acceptance.png")
        print(picture_of_page(browser, FOLDER / "page.png"))


if __name__ == "__main__":
    main()
