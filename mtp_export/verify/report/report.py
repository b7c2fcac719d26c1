"""A finished verification: options, machine, every check's items, and the verdict.

The JSON that it becomes is described in docs/verify.md.
"""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mtp_checkpoints.errors import MtpExportError, VerificationError
from mtp_checkpoints.layouts import engine_of
from mtp_checkpoints.sources.byte_source import Address
from mtp_export import __version__
from mtp_export.bundle.launch import engines_of, node_lines
from mtp_export.verify.check import (
    ENGINE,
    LEFT_OUT,
    CheckResult,
    Item,
    Status,
    overall,
    unknown_words,
)
from mtp_export.verify.context import Context
from mtp_export.verify.options import VerifyOptions

FORMAT, FORMAT_VERSION = "mtp-export verification", 1
_NAMED_FAILURES = 3
BUNDLE, CHECKPOINT = "bundle", "checkpoint"  # kinds of what is verified
_OF_FILES = "no fault in headers and configs"
_OF_WEIGHTS = {"files", "ledger", "weights"}  # checks that decode nothing


@dataclass(frozen=True)
class Report:
    """The results of every check, in order; facts are the kind of what was verified, the
    manifest's options and SHA-256, and sizes in bytes. date: of its end, in UTC, as ISO 8601 has
    it. command: the command line that ran it. launch: the command that serves the bundle with the
    recommended number of drafts, by engine."""

    options: VerifyOptions
    facts: dict[str, Any]
    results: tuple[CheckResult, ...]
    seconds: float
    date: str = ""
    command: str = ""
    launch: Mapping[str, str] = field(default_factory=dict)

    @property
    def status(self) -> Status:
        """Fail if any item failed, pass if any passed, else not tested."""
        return overall(result.status for result in self.results)

    @property
    def items(self) -> Iterator[tuple[CheckResult, Item]]:
        """Every item with the result of its check."""
        return ((result, item) for result in self.results for item in result.items)

    def data(self, check: str, *keys: str) -> Iterator[Mapping[str, Any]]:
        """Yield the data of a check's items that have all these keys, but for what could not be
        told."""
        for result, item in self.items:
            is_told = result.name == check and item.status is not Status.NOT_TESTED
            if is_told and all(key in item.data for key in keys):
                yield item.data

    @property
    def engines(self) -> dict[str, bool]:
        """Engines, by name, whose reading of the draft was judged, and whether nothing failed for
        them: what fails for no engine in particular fails for each."""
        judged: dict[str, bool] = {}
        for _, item in self.items:
            if ENGINE in item.data:
                judged[item.data[ENGINE]] = item.status is not Status.FAIL
        of_all = any(i.status is Status.FAIL and ENGINE not in i.data for _, i in self.items)
        return {name: reads and not of_all for name, reads in judged.items()}

    @property
    def sound_for(self) -> list[str]:
        """Names of the engines that read the draft as it is where others do not."""
        judged = self.engines
        return [] if all(judged.values()) else [name for name, reads in judged.items() if reads]

    @property
    def recommended_k(self) -> int | None:
        """Number of drafts that check `speed` recommends for its largest batch; None where it was
        not run, or nothing was gained."""
        told = (item.data["recommended"] for _, item in self.items if "recommended" in item.data)
        by_batch: Mapping[str, Any] = next(told, {})
        return int(by_batch[max(by_batch, key=int)]["k"]) or None if by_batch else None

    def count(self, status: Status) -> int:
        """Number of items of a status."""
        return sum(item.status is status for _, item in self.items)

    def raise_if_failed(self, *, told: bool = False) -> None:
        """Raise VerificationError naming the failed items, if there are any; told: by their number
        alone, since they were printed."""
        failed = [
            f"{result.name}: {_failure(item)}"
            for result, item in self.items
            if item.status is Status.FAIL
        ]
        if not failed:
            return
        named = "; ".join(failed[:_NAMED_FAILURES])
        more = len(failed) - _NAMED_FAILURES
        kind = self.facts["kind"]
        repairs = list(dict.fromkeys(item.repair for _, item in self.items if item.repair))
        usual = (
            "export it again from a checked source" if kind == BUNDLE else "look into the report"
        )
        what = f"Verification failed in {len(failed)} of {sum(1 for _ in self.items)} items"
        ship = f"Do not ship this {kind}{_verdict_by_engine(self)}"
        error = VerificationError(what, todo=ship if self.sound_for else "Do not ship it")
        if not told:
            error = VerificationError(
                what,
                where=self.options.bundle,
                found=named + (f"; and {more} more" if more > 0 else ""),
                todo=f"{ship}; " + (_run(repairs[0]) if repairs else usual),
            )
        for _, item in self.items:  # of internal errors, for --debug
            if "traceback" in item.data:
                error.add_note(item.data["traceback"])
        raise error

    def raise_if_not_tested(self) -> None:
        """Raise VerificationError naming the items that were not tested, but for checks that the
        options leave out."""
        left = [
            f"{result.name}: {item.name}: {item.cause}"
            for result, item in self.items
            if item.status is Status.NOT_TESTED and LEFT_OUT not in item.data
        ]
        if left:
            named = "; ".join(left[:_NAMED_FAILURES])
            more = len(left) - _NAMED_FAILURES
            raise VerificationError(
                f"Not everything was tested: {len(left)} of {sum(1 for _ in self.items)} items",
                where=self.options.bundle,
                expected="no item that is not tested, with --strict",
                found=named + (f"; and {more} more" if more > 0 else ""),
                todo="Give what they lack, or leave out --strict",
            )

    def as_json(self) -> dict[str, Any]:
        """The report as documented in docs/verify.md."""
        return {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "tool_version": __version__,
            "date": self.date,
            "command": self.command,
            "status": self.status,
            "recommended_k": self.recommended_k,
            "launch": dict(self.launch),
            "counts": {status: self.count(status) for status in Status},
            "engines": self.engines,
            "seconds": round(self.seconds, 3),
            "machine": _machine(),
            "options": {
                name: str(value) if isinstance(value, Path | Address) else value
                for name, value in vars(self.options).items()
            }
            | {"level": self.options.level.name.lower()},
            "bundle": self.facts,
            "checks": [
                {
                    "name": result.name,
                    "title": result.title,
                    "status": result.status,
                    "seconds": round(result.seconds, 3),
                    "items": [dict(vars(item)) for item in result.items],
                }
                for result in self.results
            ],
        }


def report_of(context: Context, results: tuple[CheckResult, ...], seconds: float) -> Report:
    """The report of the checks that ran over a context, and of their duration."""
    shards = (context.manifest or {}).get("source", {}).get("shards", {})
    facts = {
        "kind": BUNDLE if context.is_bundle else CHECKPOINT,
        "options": dict(context.recorded_options),
        "manifest_sha256": context.manifest_sha256,
        "tensor_bytes": _tensor_bytes(context),
        "source_bytes": sum(shard.get("size_bytes", 0) for shard in shards.values()),
        "parts_bytes": {
            part.name: sum(shard.size_bytes for shard in part.checkpoint.shards)
            if part.checkpoint is not None
            else 0
            for part in context.parts
        },
    }
    report = Report(
        options=context.options,
        facts=facts,
        results=results,
        seconds=seconds,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=shlex.join(("mtp-export", *sys.argv[1:])),
    )
    if report.status is not Status.PASS or not context.is_bundle:
        return report
    return replace(report, launch=_launch(context, report.recommended_k or 1))


def _tensor_bytes(context: Context) -> dict[str, int]:
    """Bytes of the tensors of each part, and of those that they were made of as "source", where
    they are known: without the headers of files, as the other commands count them."""
    parts = {
        name: sum(tensor.size_bytes for tensor in part.tensors.values())
        for name, part in context.checkpoints.items()
    }
    before = (context.manifest or {}).get("sizes", {}).get("bytes_before")
    if before is None and context.source is not None:
        before = sum(tensor.size_bytes for tensor in context.source.tensors.values())
    return parts if before is None else {"source": before, **parts}


def _launch(context: Context, k: int) -> dict[str, str]:
    """The command that serves a bundle with k drafts, by engine; none where no engine does."""
    if not context.is_local:
        return {}
    bundle = context.folder
    try:
        names = engines_of(bundle)
        return {name: "\n".join(node_lines(bundle, name, None, k)) for name in names}
    except MtpExportError:  # of a bundle without one of its parts
        return {}


def method_of(data: Mapping[str, Any]) -> str:
    """The beginning of a label: the method, where the figure is not the MTP module's."""
    return f"{data['method']}, " if "method" in data else ""


def recommended(report: Report) -> str:
    """The figure of check `speed` that says which number of drafts to use; "" without one."""
    figures = (
        item.figure
        for result, item in report.items
        if result.name == "speed" and "recommended" in item.data
    )
    return next(figures, "")


def _run(command: str) -> str:
    names = unknown_words(command)
    return f"run {command}" + (f" ({names})" if names else "")


def _verdict_by_engine(report: Report) -> str:
    """Return the end of a verdict where engines differ: for which it is, and which read it."""
    sound = report.sound_for
    if not sound:
        return ""
    failed = _titles(name for name in report.engines if name not in sound)
    alone = " or ".join(f"--engine {name}" for name in sound)
    reads = "reads" if len(sound) == 1 else "read"
    return f" for {failed}; {_titles(sound)} {reads} it as it is ({alone})"


def _titles(names: Iterable[str]) -> str:
    return " and ".join(engine_of(name).title for name in names)


def verdict_line(report: Report) -> str:
    """The verdict with what was verified, and how deep: a level that was not run is not passed."""
    left_out = sum(result.status is Status.NOT_TESTED for result in report.results)
    engine = report.options.engine
    alone = f" for {_titles([engine])}" if engine else ""
    depth = {
        Status.PASS: _sound(report) + alone,
        Status.FAIL: f"FAILED{alone}{_verdict_by_engine(report)}",
        Status.NOT_TESTED: "nothing was tested",
    }[report.status]
    line = f"Verification of {report.options.bundle}: {depth}"
    if report.status is Status.PASS and left_out:
        line += f"; {left_out} of {len(report.results)} checks not run"
    return line


def _sound(report: Report) -> str:
    """Words for what passed, by the deepest check that ran."""
    passed = {result.name for result in report.results if result.status is Status.PASS}
    if passed <= {"files"}:
        return _OF_FILES
    return "no fault in files and weights" if passed <= _OF_WEIGHTS else "passed"


def verdict_words(report: Report) -> str:
    """The verdict in one line, with the counts of items."""
    counts = ", ".join(f"{report.count(status)} {status}" for status in Status)
    files_alone = _sound(report) == _OF_FILES
    verdict = {
        Status.PASS: _OF_FILES.capitalize() if files_alone else "Verified",
        Status.FAIL: "NOT verified",
        Status.NOT_TESTED: "Nothing was tested",
    }[report.status]
    return f"{verdict}: {counts}, in {report.seconds:.1f} s."


def _failure(item: Item) -> str:
    parts = [item.name]
    if item.subject:
        parts.append(f"({item.subject})")
    if item.figure:
        parts.append(item.figure + (f" against {item.bound}" if item.bound else ""))
    text = " ".join(parts)
    return f"{text}: {item.cause.rstrip('.')}" if item.cause else text


def _machine() -> dict[str, Any]:
    return {
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }
