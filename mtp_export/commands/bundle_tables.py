"""Plans, results and shares of bundles, as tables for people and as JSON facts for machines."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType

from mtp_checkpoints.containers.base import CONFIG_NAME
from mtp_checkpoints.layouts import target_of
from mtp_checkpoints.sources.disk_queue import BLOCK_BYTES
from mtp_export.bundle.build import BundleResult
from mtp_export.bundle.bundle_plan import BundlePlan
from mtp_export.bundle.launch import launch_lines
from mtp_export.bundle.options import Share
from mtp_export.bundle.preflight import free_disk_bytes, needed_disk_bytes
from mtp_export.bundle.sizes import USABLE_BYTES, Sizes
from mtp_export.commands.next_steps import draft_launch, next_steps
from mtp_export.commands.output import FiguresTable, heading
from mtp_export.plan import COPY, PartPlan
from mtp_export.progress import counted, format_binary, format_bytes

_SHOWN_ROLES = 3


def _part_facts(part: PartPlan) -> dict[str, Any]:
    steps = [step for shard in part.written for step in shard.steps]
    return {
        "shards": len(part.shards),
        "tensors": part.tensor_count,
        "copied_bytes": sum(step.size_bytes for step in steps if step.operation == COPY),
        "computed_bytes": sum(step.size_bytes for step in steps if step.operation != COPY),
        "linked_shards": len(part.linked),
        "linked_bytes": sum(shard.size_bytes for shard in part.linked),
        "checksummed_bytes": sum(shard.size_bytes for shard in part.checked),
        "files": [
            *(shard.file_name for shard in part.shards),
            *(*part.index_names, CONFIG_NAME),
            *part.extra_files,
        ],
    }


def plan_facts(plan: BundlePlan) -> dict[str, Any]:
    """Return the plan of a bundle, sizes in bytes."""
    return {
        "input_dir": str(plan.options.input_dir),
        "output_dir": str(plan.options.output_dir),
        "target": target_of(plan.options.target).name,
        "target_option": plan.options.target,
        "parts": {part.name: _part_facts(part) for part in plan.parts},
        "disk_bytes": plan.written_bytes,
        "needed_disk_bytes": needed_disk_bytes(plan.disk_bytes),
        "memory_bytes": plan.memory_bytes,
        "io_depth": plan.io_depth,
        **plan.sizes.as_json(),
        **({} if plan.downloads is None else {"download_bytes": plan.downloads.size_bytes}),
    }


def result_facts(result: BundleResult) -> dict[str, Any]:
    """Return the result of a run in bytes and seconds, and the commands that serve the bundle."""
    plan = result.plan
    serving = {"launch": launch_lines(plan), "draft_launch": draft_launch(plan)}
    facts = plan_facts(plan) | {"next": next_steps(plan)} | serving
    seconds = {"seconds": round(result.seconds, 3)}
    if result.shares is not None:  # each has told how long it took
        return facts | {"shares": result.shares} | seconds
    rate = round(_done_bytes(result.plan) / max(result.seconds, 1e-9))
    return facts | {"resumed_shards": result.resumed_shards, **seconds, "bytes_per_second": rate}


def _done_bytes(plan: BundlePlan) -> int:
    return plan.written_bytes + plan.checked_bytes


def effort(result: BundleResult) -> str:
    """Return a sentence with the bytes written and read, and the time and the rate or the shares
    that did it."""
    plan, seconds = result.plan, result.seconds
    read = f", {format_bytes(plan.checked_bytes)} linked and checksummed"
    done = f"{format_bytes(plan.written_bytes)} written{read if plan.checked_bytes else ''}"
    if result.shares is not None:
        return f"{done} by {result.shares} shares."
    return f"{done} in {seconds:.1f} s, {format_bytes(_done_bytes(plan) / max(seconds, 1e-9))}/s."


def size_lines(sizes: Sizes) -> list[str]:
    """Return what a bundle weighs, why it is larger where it is, and whether a machine of 8 GPUs
    has room for it, for people."""
    share = sizes.after_bytes / max(sizes.before_bytes, 1)
    lines = [
        f"{format_bytes(sizes.before_bytes)} before, {format_bytes(sizes.after_bytes)}"
        f" ({format_binary(sizes.after_bytes)}) after: {share:.2f} x source,"
        f" {sizes.bits_per_weight:.2f} bits per weight."
    ]
    if sizes.growth:
        grown = (
            f"{each.role} is {each.storage} in place of {each.source_storage}"
            f" (+{format_bytes(each.grown_bytes)})"
            for each in sizes.growth[:_SHOWN_ROLES]
        )
        lines.append(f"Larger than the source: {'; '.join(grown)}.")
    fits = "yes, with a tenth left for the cache"
    if not sizes.fits:
        fits = f"no: without a tenth for the cache {format_bytes(USABLE_BYTES)} are left"
    return [*lines, f"Fits 8 x 80 GB: {fits}."]


def resumed(result: BundleResult) -> list[str]:
    """Return the sentence that an earlier run did part of the work, where one did."""
    count = result.resumed_shards
    if not count:
        return []
    return [f"{count} {'shard was' if count == 1 else 'shards were'} finished by an earlier run."]


def parts_table(plan: BundlePlan) -> FiguresTable:
    """Return a table with a row per part of the bundle."""
    table = FiguresTable()
    table.add_words("part")
    table.add_figures("shards", "tensors", "copied", "computed")
    table.add_column("linked", justify="right", overflow="fold")
    for part in plan.parts:
        facts = _part_facts(part)
        linked = format_bytes(facts["linked_bytes"])
        ways = ", ".join(sorted({shard.link for shard in part.linked}))
        table.add_row(
            part.name,
            str(facts["shards"]),
            f"{facts['tensors']:,}",
            format_bytes(facts["copied_bytes"]),
            format_bytes(facts["computed_bytes"]),
            f"{linked} in {len(part.linked)} ({ways})" if part.linked else "-",
        )
    return table


def plan_table(plan: BundlePlan) -> RenderableType:
    """Return the plan of a dry run for people."""
    needed = needed_disk_bytes(plan.disk_bytes)
    reserve = format_bytes(needed - plan.disk_bytes)
    free = format_bytes(free_disk_bytes(plan.options.output_dir))
    needs = (
        f"Needs {format_bytes(needed)} of disk ({reserve} of it in reserve for indexes, configs and"
        f" the manifest), of which {free} are free, and at least"
        f" {format_bytes(plan.memory_bytes)} of memory. Nothing was written."
    )
    run = plan.options.run
    speed = (
        f"Works on {run.workers} tensors at once, with up to {plan.io_depth} reads and as many"
        f" writes of {format_bytes(BLOCK_BYTES)} under way."
    )
    files = f"Beside the weights: {', '.join(plan.parts[0].extra_files) or 'nothing'}."
    title = heading(f"Plan for {plan.options.output_dir}")
    sizes = size_lines(plan.sizes)
    return Group(title, parts_table(plan), *sizes, *_download_lines(plan), files, speed, needs)


def _download_lines(plan: BundlePlan) -> list[str]:
    """Return the line that says how much a remote source's part is of the whole."""
    if plan.downloads is None:
        return []
    total_bytes = sum(shard.size_bytes for shard in plan.checkpoint.shards)
    return [
        f"Downloads {format_bytes(plan.downloads.size_bytes)} of {format_bytes(total_bytes)} from"
        f" {plan.checkpoint.path}."
    ]


def planned_facts(plan: BundlePlan, share: Share) -> dict[str, Any]:
    """Return how much of a plan a share makes."""
    jobs = plan.share_jobs
    done = sum(job.read_bytes for job in jobs)
    return {"share": str(share), "share_shards": len(jobs), "share_bytes": done}


def planned_line(plan: BundlePlan, share: Share) -> str:
    """Return how much of a plan a share makes, for people."""
    facts = planned_facts(plan, share)
    return (
        f"Share {share.number} of {share.count}{share.said} makes {facts['share_shards']} of"
        f" {counted(len(plan.jobs), 'shard')}, {format_bytes(facts['share_bytes'])}."
    )


def share_facts(result: BundleResult) -> dict[str, Any]:
    """Return the result of a share in bytes and seconds."""
    share, done = result.plan.options.run.share, _share_bytes(result)
    assert share is not None, "a share's result"
    origin = {"share_origin": share.origin} if share.origin else {}
    return {
        "input_dir": str(result.plan.options.input_dir),
        "output_dir": str(result.plan.options.output_dir),
        "share": str(share),
        **origin,
        "shards": len(result.plan.share_jobs),
        "shards_of_bundle": len(result.plan.jobs),
        "done_bytes": done,
        "resumed_shards": result.resumed_shards,
        "seconds": round(result.seconds, 3),
        "bytes_per_second": round(done / max(result.seconds, 1e-9)),
    }


def share_table(result: BundleResult) -> RenderableType:
    """Return the result of a share for people."""
    share, output = result.plan.options.run.share, result.plan.options.output_dir
    assert share is not None, "a share's result"
    done, seconds = _share_bytes(result), result.seconds
    lines = [
        f"{len(result.plan.share_jobs)} of {counted(len(result.plan.jobs), 'shard')},"
        f" {format_bytes(done)} in {seconds:.1f} s, {format_bytes(done / max(seconds, 1e-9))}/s.",
    ]
    if result.resumed_shards:
        lines.append(f"Finished by an earlier run: {result.resumed_shards}.")
    lines.append(f"When all shares are made: mtp-export finish {output}")
    title = heading(f"Share {share.number} of {share.count}{share.said} of {output}")
    return Group(title, *lines)


def _share_bytes(result: BundleResult) -> int:
    """Return the bytes that were written, or linked and checksummed."""
    return sum(job.read_bytes for job in result.plan.share_jobs)
