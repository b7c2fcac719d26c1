"""Every item of a report: a table of at most 100 columns, or lines where a terminal is narrow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType
from rich.constrain import Constrain
from rich.table import Table
from rich.text import Text

from mtp_export.paragraphs import lines_of
from mtp_export.verify.check import Item
from mtp_export.verify.report.report import Report
from mtp_export.verify.report.summary import STYLES
from mtp_export.verify.report.undone import undone_lines

_MOST_COLUMNS, _LEAST_COLUMNS = 100, 64


@dataclass(frozen=True)
class ItemTable:
    """Every item by check, with figure and bound, then the changes that were undone to explain
    failures; never wider than the terminal."""

    report: Report

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        """Yield the table, or its rows as lines."""
        if options.max_width >= _LEAST_COLUMNS:
            yield Constrain(_table(self.report), _MOST_COLUMNS)
        else:
            for result, item in self.report.items:
                row = Text.assemble(f"{result.name}, {item.name}: ", *_outcome(item))
                yield from lines_of(row, console, options.max_width)
        undone = list(undone_lines(self.report))
        for line in undone:
            yield from lines_of(Text(line), console, options.max_width, 4)
        if undone:
            yield Text()


def _table(report: Report) -> Table:
    table = Table(expand=True)
    table.add_column("check", no_wrap=True)
    table.add_column("item", ratio=27, overflow="fold")
    table.add_column("result", no_wrap=True)
    table.add_column("figure", ratio=22, overflow="fold")
    table.add_column("bound", ratio=19, overflow="fold")
    for result in report.results:
        for number, item in enumerate(result.items):
            name = result.name if number == 0 else ""
            table.add_row(
                name,
                Text(item.name),
                Text(item.status, STYLES[item.status]),
                Text(item.figure),
                Text(item.bound),
            )
        table.add_section()
    return table


def _outcome(item: Item) -> Iterator[str | tuple[str, str]]:
    yield str(item.status), STYLES[item.status]
    if item.measured:
        yield f", {item.measured}"
