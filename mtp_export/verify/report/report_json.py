"""The report as the JSON that docs/verify.md describes."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

from mtp_checkpoints.sources.byte_source import Address
from mtp_export import __version__
from mtp_export.verify.check import Status
from mtp_export.verify.report.failures import causes_of
from mtp_export.verify.report.report import Report

FORMAT, FORMAT_VERSION = "mtp-export verification", 1


def report_json(report: Report) -> dict[str, Any]:
    """Return a report as an object of JSON."""
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "tool_version": __version__,
        "date": report.date,
        "command": report.command,
        "status": report.status,
        "recommended_k": report.recommended_k,
        "launch": dict(report.launch),
        "counts": {status: report.count(status) for status in Status},
        "engines": report.engines,
        "seconds": round(report.seconds, 3),
        "machine": _machine(),
        "options": {
            name: str(value) if isinstance(value, Path | Address) else value
            for name, value in vars(report.options).items()
        }
        | {"level": report.options.level.name.lower()},
        "bundle": report.facts,
        "causes": [
            {
                "title": cause.title,
                "text": cause.text,
                "repairs": cause.repairs,
                "items": [{"check": check, "name": item.name} for check, item in cause.items],
            }
            for cause in causes_of(report)
        ],
        "checks": [
            {
                "name": result.name,
                "title": result.title,
                "status": result.status,
                "seconds": round(result.seconds, 3),
                "items": [dict(vars(item)) for item in result.items],
            }
            for result in report.results
        ],
    }


def _machine() -> dict[str, Any]:
    return {
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }
