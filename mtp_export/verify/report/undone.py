"""The changes that were undone to explain failures, as a report shows them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mtp_export.verify.check import UNDONE, Status
from mtp_export.verify.evidence.statistics import Estimate
from mtp_export.verify.report.report import Report

Rows = Sequence[Mapping[str, Any]]


def undone_of(report: Report) -> Iterator[tuple[str, str, Rows]]:
    """Yield check, item and rows of each failure for which changes were undone, best first."""
    for result, item in report.items:
        if item.status is Status.FAIL and item.data.get(UNDONE):
            yield result.name, item.name, item.data[UNDONE]


def undone_lines(report: Report) -> Iterator[str]:
    """Yield a heading for each such failure, and a line per change."""
    for check, name, rows in undone_of(report):
        yield f"{check}, {name}: gain in nats per token, best first, when"
        for row in rows:
            yield f"  {gain_text(row['gain'])}: {row['change']}"


def gain_text(gain: Mapping[str, Any]) -> str:
    """Return a gain with its interval, as in 2.36 [2.24, 2.48]."""
    return Estimate(**gain).shown(2 if abs(gain["value"]) >= 0.1 else 3)
