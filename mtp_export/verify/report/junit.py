"""The report as JUnit XML, as CI systems show it: one suite per check, one test case per item."""

from __future__ import annotations

from collections.abc import Iterator
from xml.etree import ElementTree

from mtp_export.verify.check import Item, Status
from mtp_export.verify.report.failures import Cause, causes_of, repairs
from mtp_export.verify.report.report import Report


def junit_xml(report: Report) -> str:
    """The report with failed items as failures, and items not tested as skipped, with reasons."""
    suites = _element(
        "testsuites",
        name=f"mtp-export verify {report.options.bundle}",
        tests=str(sum(1 for _ in report.items)),
        failures=str(report.count(Status.FAIL)),
        skipped=str(report.count(Status.NOT_TESTED)),
        time=f"{report.seconds:.3f}",
    )
    explained = {id(item): lines for cause, lines in _explained(report) for _, item in cause.items}
    for result in report.results:
        suite = _element(
            "testsuite",
            name=result.title,
            tests=str(len(result.items)),
            failures=str(sum(item.status is Status.FAIL for item in result.items)),
            skipped=str(sum(item.status is Status.NOT_TESTED for item in result.items)),
            time=f"{result.seconds:.3f}",
        )
        for item in result.items:
            case = _case(f"verify.{result.name}", item)
            if item.status is Status.FAIL:
                lines = (item.subject, item.measured, item.cause, *explained[id(item)])
                text = "\n".join(filter(None, lines))
                case.append(_element("failure", text, message=item.cause or item.measured))
            suite.append(case)
        suites.append(suite)
    ElementTree.indent(suites)
    return ElementTree.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


def _case(class_name: str, item: Item) -> ElementTree.Element:
    case = _element("testcase", name=item.name, classname=class_name)
    if item.status is Status.NOT_TESTED:
        case.append(_element("skipped", message=item.cause))
    elif item.status is Status.PASS and item.measured:
        case.append(_element("system-out", item.measured))
    return case


def _explained(report: Report) -> Iterator[tuple[Cause, list[str]]]:
    """Yield each cause with the lines that its items end with: what fails for it, if it is more
    than one item, and the commands that mend it."""
    titles = repairs(report)
    for cause in causes_of(report):
        lines = [line for command in cause.repairs for line in (titles[command], command)]
        if (count := len(cause.items)) > 1:
            lines.insert(0, f"{count:,} items fail for one cause: {cause.title}: {cause.text}")
        yield cause, lines


def _element(tag: str, text: str = "", **attributes: str) -> ElementTree.Element:
    """Return an element of which every text can be written."""
    cleaned = {name: _clean(value) for name, value in attributes.items()}
    element = ElementTree.Element(tag, cleaned)
    element.text = _clean(text) or None
    return element


def _clean(text: str) -> str:
    """Text with what XML cannot hold escaped: control characters, and bytes that are no UTF-8."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
