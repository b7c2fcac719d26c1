"""A finished verification: options, every check's items, and the verdict."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from mtp_checkpoints.errors import MtpExportError
from mtp_export.bundle.launch import engines_of, node_lines
from mtp_export.verify.check import (
    ENGINE,
    CheckResult,
    Item,
    Status,
    overall,
)
from mtp_export.verify.context import Context
from mtp_export.verify.options import VerifyOptions

BUNDLE, CHECKPOINT = "bundle", "checkpoint"  # kinds of what is verified


@dataclass(frozen=True, eq=False)  # one is itself alone: what is derived of it is kept by it
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
            if (name := item.data.get(ENGINE)) is not None:
                judged[name] = judged.get(name, True) and item.status is not Status.FAIL
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
    """The command that serves a bundle with k drafts, by engine that it was judged for; none where
    no engine does."""
    if not context.is_local:
        return {}
    bundle = context.folder
    try:
        chosen = context.options.engine_for(context.recorded_options)
        names = [name for name in engines_of(bundle) if chosen in (None, name)]
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
