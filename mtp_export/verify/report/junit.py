"""The report as JUnit XML, as CI systems show it: one suite per check, one test case per item."""

from __future__ import annotations

from xml.etree import ElementTree

from mtp_export.verify.check import Item, Status
from mtp_export.verify.report.report import Report


def junit_xml(report: Report) -> str:
    """The report with failed items as failures, and items not tested as skipped, with reasons."""
    suites = ElementTree.Element(
        "testsuites",
        name=f"mtp-export verify {report.options.bundle}",
        tests=str(sum(1 for _ in report.items)),
        failures=str(report.count(Status.FAIL)),
        skipped=str(report.count(Status.NOT_TESTED)),
        time=f"{report.seconds:.3f}",
    )
    for result in report.results:
        suite = ElementTree.SubElement(
            suites,
            "testsuite",
            name=result.title,
            tests=str(len(result.items)),
            failures=str(sum(item.status is Status.FAIL for item in result.items)),
            skipped=str(sum(item.status is Status.NOT_TESTED for item in result.items)),
            time=f"{result.seconds:.3f}",
        )
        for item in result.items:
            _case(suite, f"verify.{result.name}", item)
    ElementTree.indent(suites)
    return ElementTree.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


def _case(suite: ElementTree.Element, class_name: str, item: Item) -> None:
    case = ElementTree.SubElement(suite, "testcase", name=_clean(item.name), classname=class_name)
    measured = f"{item.figure} (bound: {item.bound})" if item.bound else item.figure
    if item.status is Status.FAIL:
        failure = ElementTree.SubElement(case, "failure", message=_clean(item.cause))
        failure.text = _clean(f"{item.subject}\n{measured}\n{item.cause}".strip())
    elif item.status is Status.NOT_TESTED:
        ElementTree.SubElement(case, "skipped", message=_clean(item.cause))
    elif measured:
        ElementTree.SubElement(case, "system-out").text = _clean(measured)


def _clean(text: str) -> str:
    """Text without the control characters that XML cannot hold."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)
