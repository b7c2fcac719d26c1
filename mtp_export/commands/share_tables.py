"""Results of shares, as a table for people and as JSON facts for machines."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType

from mtp_export.bundle.bundle_plan import BundlePlan
from mtp_export.bundle.options import Share
from mtp_export.bundle.shares import ShareResult, jobs_of
from mtp_export.commands.output import heading
from mtp_export.progress import format_bytes


def planned_facts(plan: BundlePlan, share: Share) -> dict[str, Any]:
    """Return how much of a plan a share makes."""
    jobs = jobs_of(plan.jobs, share)
    done = sum(job.read_bytes for job in jobs)
    return {"share": str(share), "share_shards": len(jobs), "share_bytes": done}


def planned_line(plan: BundlePlan, share: Share) -> str:
    """Return how much of a plan a share makes, for people."""
    facts = planned_facts(plan, share)
    return (
        f"Share {share.number} of {share.count}{share.said} makes {facts['share_shards']} of"
        f" {len(plan.jobs)} shards, {format_bytes(facts['share_bytes'])}."
    )


def share_facts(result: ShareResult) -> dict[str, Any]:
    """Return the result of a share in bytes and seconds."""
    done = _done_bytes(result)
    origin = {"share_origin": result.share.origin} if result.share.origin else {}
    return {
        "input_dir": str(result.plan.options.input_dir),
        "output_dir": str(result.plan.options.output_dir),
        "share": str(result.share),
        **origin,
        "shards": len(result.jobs),
        "shards_of_bundle": len(result.plan.jobs),
        "done_bytes": done,
        "resumed_shards": result.resumed_shards,
        "seconds": round(result.seconds, 3),
        "bytes_per_second": round(done / max(result.seconds, 1e-9)),
    }


def share_table(result: ShareResult) -> RenderableType:
    """Return the result of a share for people."""
    share, output = result.share, result.plan.options.output_dir
    done, seconds = _done_bytes(result), result.seconds
    lines = [
        f"{len(result.jobs)} of {len(result.plan.jobs)} shards, {format_bytes(done)} in"
        f" {seconds:.1f} s, {format_bytes(done / max(seconds, 1e-9))}/s.",
    ]
    if result.resumed_shards:
        lines.append(f"Finished by an earlier run: {result.resumed_shards}.")
    lines.append(f"When all shares are made: mtp-export finish {output}")
    title = heading(f"Share {share.number} of {share.count}{share.said} of {output}")
    return Group(title, *lines)


def _done_bytes(result: ShareResult) -> int:
    """Return the bytes that were written, or linked and checksummed."""
    return sum(job.read_bytes for job in result.jobs)
