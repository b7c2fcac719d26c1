"""The report as a terminal table of at most 100 columns, then remarks and the verdict."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.constrain import Constrain
from rich.table import Table
from rich.text import Text

from mtp_export.verify.check import WHOLE_CHECK, Item, Status
from mtp_export.verify.report.report import Report, verdict_words

_MOST_COLUMNS = 100
_STYLES = {Status.PASS: "green", Status.FAIL: "bold red", Status.NOT_TESTED: "yellow"}


def report_table(report: Report) -> RenderableType:
    """Every item by check, then failures and reasons in words, then the verdict."""
    table = Table(expand=True)
    table.add_column("check", no_wrap=True)
    table.add_column("item", ratio=27, overflow="fold")
    table.add_column("result", no_wrap=True)
    table.add_column("figure", ratio=22, overflow="fold")
    table.add_column("bound", ratio=19, overflow="fold")
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
        Text(f"Verified {report.options.bundle}", "table.title", no_wrap=True),
        Constrain(table, _MOST_COLUMNS),
        *_remarks(report),
        Text(verdict_words(report), _STYLES[report.status]),
    )


def _remarks(report: Report) -> list[Text]:
    """Causes of failures and reasons of items not tested, one paragraph per sentence."""
    named: dict[tuple[str, Status], list[str]] = {}
    for result, item in report.items:
        words = " ".join(part for part in (_subject(item), item.cause) if part)
        if item.status is Status.PASS or not words:
            continue
        name = result.name if item.name == WHOLE_CHECK else f"{result.name}, {item.name}"
        repair = f" Repair: {item.repair}" if item.repair else ""
        named.setdefault((words + repair, item.status), []).append(name)
    return [
        Text(f"{'; '.join(names)}: {words}", _STYLES[status])
        for (words, status), names in named.items()
    ]


def _subject(item: Item) -> str:
    return f"{item.subject}:" if item.subject and item.subject not in item.cause else ""
