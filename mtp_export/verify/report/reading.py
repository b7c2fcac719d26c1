"""Reader of the JSON report that a verification wrote."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.sources import strict_json
from mtp_checkpoints.sources.files import check_small_file, read_failure
from mtp_export.verify.check import CheckResult, Item, Level, Status
from mtp_export.verify.options import VerifyOptions, parse_engine
from mtp_export.verify.report.charts import charts
from mtp_export.verify.report.report import Report
from mtp_export.verify.report.report_json import FORMAT, FORMAT_VERSION

_TODO = "Make one with mtp-export verify BUNDLE --report FILE.json"


def read_report(path: Path) -> Report:
    """Return the report in a file; its charts can be drawn.

    Raises InvalidInputError for a file that is no such report, IoError for one that cannot be read.
    """
    try:
        check_small_file(path, path.stat().st_size)
        content = strict_json.parse(path.read_bytes())
    except OSError as error:
        raise read_failure(path, error) from error
    except ValueError as error:
        raise _no_report(path, f"no JSON: {error}") from None
    found = (content.get("format"), content.get("format_version")) if _is_object(content) else None
    if found != (FORMAT, FORMAT_VERSION):
        kind = f"{found[0]}, version {found[1]}" if found else type(content).__name__
        raise _no_report(path, kind)
    try:
        report = _report(content)
        charts(report)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _no_report(path, f"a damaged one: {error!r}") from error
    return report


def _is_object(content: Any) -> bool:
    return isinstance(content, dict)


def _report(content: Mapping[str, Any]) -> Report:
    options, facts = content["options"], content["bundle"]
    given = VerifyOptions(
        bundle=Path(options["bundle"]),
        source=None if options["source"] is None else Path(options["source"]),
        level=Level[options["level"].upper()],
        checksums=bool(options["checksums"]),
        stream=bool(options["stream"]),
        engine=None if options.get("engine") is None else parse_engine(options["engine"]),
    )
    # What the charts and the verdict count on; Item and the others refuse unknown keys themselves.
    facts = {**facts, "source_bytes": int(facts["source_bytes"])}
    for key in ("parts_bytes", "tensor_bytes"):
        facts[key] = {name: int(size) for name, size in facts.get(key, {}).items()}
    results = tuple(
        CheckResult(
            name=str(check["name"]),
            title=str(check["title"]),
            items=tuple(
                Item(**{**item, "status": Status(item["status"])}) for item in check["items"]
            ),
            seconds=float(check["seconds"]),
        )
        for check in content["checks"]
    )
    return Report(
        options=given,
        facts=facts,
        results=results,
        seconds=float(content["seconds"]),
        date=str(content.get("date", "")),
        command=str(content.get("command", "")),
        launch={str(name): str(line) for name, line in content.get("launch", {}).items()},
    )


def _no_report(path: Path, found: str) -> InvalidInputError:
    return InvalidInputError(
        "This is no report of a verification",
        where=path,
        expected=f"{FORMAT}, version {FORMAT_VERSION}",
        found=found[:200],
        todo=_TODO,
    )
