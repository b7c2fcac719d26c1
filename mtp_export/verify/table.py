"""The report as a table of at most 100 columns: failures first in words, then every item."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.constrain import Constrain
from rich.table import Table
from rich.text import Text

from mtp_export.verify.base import Item, Status
from mtp_export.verify.report import Report, verdict_words

_MOST_COLUMNS = 100
_STYLES = {Status.PASS: "green", Status.FAIL: "bold red", Status.NOT_TESTED: "yellow"}


def report_table(report: Report) -> RenderableType:
    """Every item under its check, then the verdict."""
    table = Table(expand=True, title=f"Verified {report.options.bundle}", title_justify="left")
    table.add_column("check", ratio=14)
    table.add_column("item", ratio=36)
    table.add_column("result", ratio=12)
    table.add_column("figure", ratio=24)
    table.add_column("bound", ratio=14)
    for result in report.results:
        for number, item in enumerate(result.items):
            name = result.name if number == 0 else ""
            style = _STYLES[item.status]
            table.add_row(
                name,
                Text(item.name),
                Text(item.status, style),
                Text(item.figure),
                Text(item.bound),
            )
        table.add_section()
    return Group(
        Constrain(table, _MOST_COLUMNS),
        *_remarks(report),
        Text(verdict_words(report), _STYLES[report.status]),
    )


def _remarks(report: Report) -> list[Text]:
    """Why items failed or were not tested, one paragraph each; equal reasons once a check."""
    lines: dict[str, Text] = {}
    for result, item in report.items:
        if item.status is Status.PASS or not (item.cause or item.subject):
            continue
        words = " ".join(part for part in (_subject(item), item.cause) if part)
        text = f"{result.name}, {item.name}: {words}"
        lines.setdefault(f"{result.name} {words}", Text(text, _STYLES[item.status]))
    return list(lines.values())


def _subject(item: Item) -> str:
    return f"{item.subject}:" if item.subject and item.subject not in item.cause else ""
