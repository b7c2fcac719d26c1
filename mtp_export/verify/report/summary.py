"""The report on one page: the verdict, each failure once with its repair, a line per check, and
what was not tested; for a terminal of any width, and as Markdown for CI."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions
from rich.text import Text

from mtp_export.paragraphs import command_lines, lines_of
from mtp_export.progress import counted
from mtp_export.verify.check import (
    LEFT_OUT,
    WHOLE_CHECK,
    CheckResult,
    Status,
)
from mtp_export.verify.evidence.statistics import Estimate
from mtp_export.verify.report.failures import MOST_CAUSES, causes_of, named, repairs
from mtp_export.verify.report.report import Report, method_of, recommended
from mtp_export.verify.report.verdict import verdict_line

STYLES = {Status.PASS: "green", Status.FAIL: "bold red", Status.NOT_TESTED: "yellow"}
_NAME_COLUMNS, _TIME_COLUMNS = 14, 10


@dataclass(frozen=True)
class Summary:
    """A report as a page; it is never wider than the terminal, but for a word of a command that
    is."""

    report: Report
    publish: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        """Yield the lines of the page."""
        for text, indent in self._paragraphs(options.max_width):
            yield from lines_of(text, console, options.max_width, indent)

    def _paragraphs(self, width: int) -> Iterator[tuple[Text, int]]:
        """Yield texts with the indent of their further lines."""
        report = self.report
        yield Text(verdict_line(report), STYLES[report.status]), 2
        yield Text(), 0
        for words in _failures(report):
            yield Text(words, STYLES[Status.FAIL]), 2
        for command, title in repairs(report).items():
            yield Text(title), 2
            yield from _command(command, width)
        if report.status is Status.FAIL:
            yield Text(), 0
        for line in _check_lines(report, width - 2):
            yield line, 2
        figures = list(_figures(report))
        for title, lines in figures:
            yield Text(), 0
            yield Text(title), 2
            for words in lines:
                yield Text(f"  {words}"), 4
        if figures:
            yield Text(), 0
        for words in _not_tested(report):
            yield Text(words, STYLES[Status.NOT_TESTED]), 2
        if self.publish:
            yield Text(), 0
            yield Text("Publish it:"), 0
            yield from _command(self.publish, width)


def _not_tested(report: Report) -> Iterator[str]:
    """Yield a sentence for each reason why checks or items were not tested, those that the options
    leave out last."""
    found: dict[str, list[str]] = {}
    left_out: dict[str, list[str]] = {}
    for result, item in report.items:
        if item.status is Status.NOT_TESTED:
            name = result.name if item.name == WHOLE_CHECK else f"{result.name}, {item.name}"
            reasons = left_out if LEFT_OUT in item.data else found
            reasons.setdefault(item.cause, []).append(name)
    for reason, names in found.items():
        yield f"not tested: {named(names)}: {reason}"
    for reason, names in left_out.items():
        yield f"not run: {', '.join(names)}: {reason}"


def markdown(report: Report) -> str:
    """Return the page as Markdown, as $GITHUB_STEP_SUMMARY takes it."""
    lines = [f"### {_escaped(verdict_line(report))}"]
    if failures := list(_failures(report)):
        lines += ["", *(f"- {_escaped(words)}" for words in failures)]
    for command, title in repairs(report).items():
        lines += ["", _escaped(title), "", "```", command, "```"]
    lines += ["", "| check | result | time |", "|---|---|--:|"]
    for result in _ran(report):
        lines.append(f"| {result.name} | {_counts(result)} | {result.seconds:.1f} s |")
    lines.append("")
    for title, figures in _figures(report):
        lines += [_escaped(title), "", *(f"- {_escaped(words)}" for words in figures)]
        lines += [""] if figures else []
    lines += [f"- {_escaped(words)}" for words in _not_tested(report)]
    return "\n".join(lines).rstrip() + "\n"


def _failures(report: Report) -> Iterator[str]:
    """Yield a sentence for each cause of failures, the first few."""
    causes = causes_of(report)
    for cause in causes[:MOST_CAUSES]:
        yield f"{cause.title}: {cause.text}"
    if (more := len(causes) - MOST_CAUSES) > 0:
        yield f"and {counted(more, 'more cause')}: --html FILE.html shows each"


def _ran(report: Report) -> list[CheckResult]:
    return [result for result in report.results if result.status is not Status.NOT_TESTED]


def _check_lines(report: Report, width: int) -> Iterator[Text]:
    """Yield a line per check, in columns where the terminal has room for them."""
    ran = _ran(report)
    widest = max((len(_counts(result)) for result in ran), default=0)
    has_room = _NAME_COLUMNS + widest + _TIME_COLUMNS <= width
    for result in ran:
        counts, time = _counts(result), f"{result.seconds:.1f} s"
        name, behind = f"{result.name}: ", f", {time}"
        if has_room:
            name, behind = result.name.ljust(_NAME_COLUMNS), time.rjust(_TIME_COLUMNS)
            counts = counts.ljust(widest)
        yield Text.assemble(name, (counts, STYLES[result.status]), behind)


def _figures(report: Report) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield sentences on what was measured of the drafts, each with the lines below it: for each k
    the share of all drafts at a position that was accepted, and the tokens of a step; then the
    number of drafts to use."""
    shares: dict[str, list[str]] = {}
    lows = []
    for data in report.data("acceptance", "k", "position", "cumulative"):
        share = Estimate(**data["cumulative"])
        shares.setdefault(_way(data), []).append(share.percent())
        lows.append(share.low)
    is_one_prompt = bool(lows) and all(low is None for low in lows)
    known = "of one prompt, which has no interval" if is_one_prompt else "with 95 % intervals"
    lines = [
        f"{_way(data)}: {', '.join(shares.get(_way(data), ['none made']))};"
        f" {data['accepted_length']['value']:.2f} tokens per step"
        for data in report.data("acceptance", "k", "accepted_length")
    ]
    if lines:
        yield f"Drafts accepted, by position ({known}):", lines
    if advice := recommended(report):
        yield f"Number of drafts: {advice}", []


def _way(data: Mapping[str, Any]) -> str:
    return f"{method_of(data)}k={data['k']}"


def _counts(result: CheckResult) -> str:
    counts = {status: sum(item.status is status for item in result.items) for status in Status}
    return ", ".join(f"{count} {status}" for status, count in counts.items() if count)


def _command(command: str, width: int) -> Iterator[tuple[Text, int]]:
    """Yield the lines of a command, each a paragraph, or of what is to be written in a file."""
    if command.startswith('"'):
        for line in command.splitlines():
            yield Text(f"  {line}"), 4
        return
    for line in command_lines(command, width):
        yield Text(line), 0


def _escaped(text: str) -> str:
    """Return a text of which Markdown reads nothing as marks."""
    return "".join(f"\\{c}" if c in "\\`*_{}[]<>#|!" else c for c in " ".join(text.split()))
