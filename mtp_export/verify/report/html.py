"""The report as one self-contained HTML page: style, charts and tables inline."""

from __future__ import annotations

from importlib.resources import files

from jinja2 import Environment

from mtp_export.verify.report.charts import charts
from mtp_export.verify.report.failures import causes_of, repairs
from mtp_export.verify.report.plots import MOST_SERIES
from mtp_export.verify.report.report import Report, recommended
from mtp_export.verify.report.report_json import report_json
from mtp_export.verify.report.verdict import verdict_line, verdict_words


def html_page(report: Report) -> str:
    """The page: verdict, a card per cause of failures, charts of measured figures, every item."""
    environment = Environment(autoescape=True)
    environment.filters["class"] = lambda status: status.replace(" ", "-")
    environment.filters["key"] = id
    facts, causes = report_json(report), causes_of(report)
    options = facts["bundle"]["options"]
    shown = [f"{key} {options[key]}" for key in ("base_quant", "mtp_quant", "target")
             if options.get(key)]  # fmt: skip
    return environment.from_string(files(__package__).joinpath("page.html").read_text()).render(
        report=report,
        facts=facts,
        made=", ".join(shown),
        title=verdict_line(report),
        verdict=verdict_words(report),
        recommended=recommended(report),
        causes=causes,
        titles=repairs(report),
        numbers={
            id(item): number
            for number, cause in enumerate(causes, start=1)
            for _, item in cause.items
        },
        charts=charts(report),
        most_series=MOST_SERIES,
    )
