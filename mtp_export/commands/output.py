"""Output of the commands: tables or JSON on stdout, everything else on stderr."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from mtp_export.options import Access, Panel, option, path_option
from mtp_export.paragraphs import command_lines, lines_of

if TYPE_CHECKING:
    from rich.status import Status

_ANY_WIDTH = 1 << 16
_NEXT = {
    "check": "Check it:  ",
    "prove": "Prove it:  ",
    "try": "Try it:    ",
    "serve": "Serve it:  ",
}
_drawing: list[Console] = []  # those that show a status now
# Of every command; the program itself reads it.
DEBUG = option("Show the traceback of an error.", Panel.REPORT)


@dataclass(frozen=True)
class Reporting:
    """Form in which a command prints its result: JSON, a table, or nothing at all where it can be
    quiet."""

    as_json: bool = field(
        default=False, metadata=option("Print the result as JSON.", Panel.REPORT, "--json")
    )
    quiet: bool = False
    debug: bool = field(default=False, metadata=DEBUG)


@dataclass(frozen=True)
class QuietReporting(Reporting):
    """Reporting of a command that can be quiet."""

    quiet: bool = field(
        default=False,
        metadata=option("Show no progress and no table.", Panel.REPORT, short="-q"),
    )


DRY_RUN = option("Show the plan and write nothing.", Panel.INPUT_OUTPUT)
REPORT = path_option(
    "Write the result to a file as JSON.", Panel.REPORT, "FILE.json", access=Access.WRITTEN
)


class FiguresTable(Table):
    """Table whose columns of figures are never cut; those of words wrap where it is narrow, and a
    terminal that is too narrow for it gets a line of words per row."""

    def add_words(self, *names: str) -> None:
        """Add columns of words."""
        for name in names:
            self.add_column(name, overflow="fold")

    def add_figures(self, *names: str) -> None:
        """Add columns of figures."""
        for name in names:
            self.add_column(name, justify="right", no_wrap=True)

    def as_lines(self) -> Iterator[Text]:
        """Yield each row as one line: its first cell, then what the others are of."""
        headers = [str(column.header) if self.show_header else "" for column in self.columns]
        for row in zip(*(column.cells for column in self.columns), strict=True):
            first, *cells = (str(cell).replace("\n", " + ") for cell in row)
            named = (f"{name} {cell}".strip() for name, cell in zip(headers[1:], cells, strict=True)
                     if cell)  # fmt: skip
            yield Text(f"{first}: {', '.join(named)}")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        for column in self.columns:
            if column.no_wrap:
                cells = [console.measure(cell, options=options) for cell in column.cells]
                head = console.measure(column.header, options=options)
                column.min_width = max(cell.maximum for cell in [head, *cells])
        return super().__rich_measure__(console, options)


def heading(text: str) -> Text:
    """Return the line above a table, which never wraps as a table's own title does."""
    return Text(text, style="table.title", no_wrap=True)


def plain_console(*, stderr: bool = False) -> Console:
    """Return a console that shows text as it is: a path may hold [bold] or :smile:."""
    return Console(stderr=stderr, markup=False, emoji=False)


def json_text(facts: dict[str, Any]) -> str:
    """Return a result as JSON, in ASCII: stdout may have any encoding."""
    return json.dumps(facts, indent=2) + "\n"


def print_result(facts: dict[str, Any], table: RenderableType, reporting: Reporting) -> None:
    """Print a result on stdout, as JSON or as a table.

    The commands that follow a bundle, and those that serve it, come after the table, to be copied.
    """
    if reporting.as_json:
        print(json_text(facts), end="")
    elif not reporting.quiet:
        show(table)
        if steps := facts.get("next"):
            print()
            for kind, command in steps.items():
                print_command(command, _NEXT[kind])
        for engine, line in facts.get("launch", {}).items():
            print(f"\nTo serve it with {engine}:")
            print_command(line)
        for method, lines in facts.get("draft_launch", {}).items():
            for engine, line in lines.items():
                show(Text(f"\nTo serve it with {engine}, drafts by {method}:"))
                print_command(line)


def print_command(commands: str, label: str = "") -> None:
    """Print a shell command, or a line for each of several, behind a label: on a terminal broken
    between its words, as a shell takes them, elsewhere whole."""
    console = plain_console()
    for command in commands.splitlines():
        lines = command_lines(command, console.width, label)
        print(*(lines if console.is_terminal else [f"{label}{command}"]), sep="\n")


def show(result: RenderableType) -> None:
    """Print tables and paragraphs. A terminal gets paragraphs as lines that fit it, also of a table
    that is wider; a file gets all unwrapped."""
    console = plain_console()
    terminal_width = console.width
    anywhere = console.options.update(max_width=_ANY_WIDTH)
    for part in result.renderables if isinstance(result, Group) else [result]:
        needed = console.measure(part, options=anywhere)
        fits = needed.minimum <= terminal_width
        paragraphs = list(_paragraphs(part, console, fits=fits)) if console.is_terminal else []
        if paragraphs:
            for text in paragraphs:
                console.print(*lines_of(text, console, terminal_width), sep="\n")
            continue
        console.width = terminal_width if fits or console.is_terminal else needed.maximum
        is_heading = isinstance(part, Text) and bool(part.no_wrap)
        console.print(part, crop=False, soft_wrap=is_heading)


def _paragraphs(part: RenderableType, console: Console, *, fits: bool) -> Iterator[Text]:
    """Yield what a terminal gets as lines: paragraphs that are no heading, or the rows of a table
    that does not fit it."""
    if isinstance(part, FiguresTable) and not fits:
        yield from part.as_lines()
    text = console.render_str(part) if isinstance(part, str) else part
    if isinstance(text, Text) and not text.no_wrap:
        yield from text.split("\n", allow_blank=True)


@contextmanager
def status(text: str) -> Iterator[Status]:
    """Show on a terminal's stderr what is being done while the block runs; update() changes it."""
    console = plain_console(stderr=True)
    with console.status(text) as shown:
        _drawing.append(console)
        try:
            yield shown
        finally:
            _drawing.remove(console)


class _Remarks(logging.Handler):
    """Prints what is logged as the program's other remarks are."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print it, with the traceback of an error."""
        remark(self.format(record))


@contextmanager
def logged_remarks() -> Iterator[None]:
    """Print warnings that are logged while the block runs, which Python's own handler would not
    wrap; whoever has handlers of logging keeps them alone."""
    root = logging.getLogger()
    if root.handlers:
        yield
        return
    handler = _Remarks(logging.WARNING)
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)


def remark(text: str) -> None:
    """Print a line on stderr, above what a terminal shows of the work under way; a terminal wraps
    it between words."""
    from mtp_export.commands.progress_bar import above_bars  # its package takes time to import

    console = _drawing[-1] if _drawing else plain_console(stderr=True)
    with above_bars():
        console.print(text, highlight=False, soft_wrap=not console.is_terminal)
