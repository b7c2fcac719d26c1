"""Plans, results and inspections as tables for people and as JSON facts for machines."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table as RichTable

from mtp_export.bundle.build import BundlePlan, BundleResult
from mtp_export.bundle.launch import launch_lines
from mtp_export.bundle.preflight import needed_disk_bytes
from mtp_export.checkpoint.plan import COPY, PartPlan
from mtp_export.checkpoint.reader import CONFIG_NAME, INDEX_NAME
from mtp_export.inspection import Inspection
from mtp_export.progress import format_bytes
from mtp_export.targets import target_of

Table = RenderableType


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
            *(INDEX_NAME, CONFIG_NAME),
            *part.extra_files,
        ],
    }


def plan_facts(plan: BundlePlan) -> dict[str, Any]:
    """What an export would do, in bytes."""
    return {
        "input_dir": str(plan.options.input_dir),
        "output_dir": str(plan.options.output_dir),
        "target": target_of(plan.options.target).name,
        "target_option": plan.options.target,
        "parts": {part.name: _part_facts(part) for part in plan.parts},
        "disk_bytes": plan.written_bytes,
        "needed_disk_bytes": needed_disk_bytes(plan.written_bytes),
        "memory_bytes": plan.memory_bytes,
    }


def result_facts(result: BundleResult) -> dict[str, Any]:
    """What an export did, in bytes and seconds, and how engines are started on it."""
    facts = plan_facts(result.plan)
    return facts | {
        "launch": launch_lines(result.plan),
        "resumed_shards": result.resumed_shards,
        "seconds": round(result.seconds, 3),
        "bytes_per_second": round(_done_bytes(result.plan) / max(result.seconds, 1e-9)),
    }


def _done_bytes(plan: BundlePlan) -> int:
    return plan.written_bytes + plan.checked_bytes


def effort(result: BundleResult) -> str:
    """What was written and what only read, how long it took, and how fast it went."""
    plan, seconds = result.plan, result.seconds
    read = f", {format_bytes(plan.checked_bytes)} linked and checksummed"
    return (
        f"{format_bytes(plan.written_bytes)} written{read if plan.checked_bytes else ''}"
        f" in {seconds:.1f} s, {format_bytes(_done_bytes(plan) / max(seconds, 1e-9))}/s."
    )


def _parts_table(title: str, plan: BundlePlan) -> RichTable:
    table = RichTable(title=title, title_justify="left")
    table.add_column("part")
    for name in ("shards", "tensors", "copied", "computed", "linked"):
        table.add_column(name, justify="right")
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


def plan_table(plan: BundlePlan) -> Table:
    """The plan of a dry run."""
    needs = (
        f"Needs {format_bytes(needed_disk_bytes(plan.written_bytes))} of disk and at least"
        f" {format_bytes(plan.memory_bytes)} of memory. Nothing was written."
    )
    files = f"Beside the weights: {', '.join(plan.parts[0].extra_files) or 'nothing'}."
    return Group(_parts_table(f"Plan for {plan.options.output_dir}", plan), files, needs)


def result_table(result: BundleResult) -> Table:
    """The end of an export."""
    lines = [effort(result)]
    if result.resumed_shards:
        lines.append(f"{result.resumed_shards} shards were finished by an earlier run.")
    missing = {"generation_config.json", "tokenizer.json"} - set(result.plan.parts[0].extra_files)
    if missing:
        lines.append(f"The source has no {' and no '.join(sorted(missing))}; engines may need it.")
    title = f"Exported to {result.plan.options.output_dir}"
    return Group(_parts_table(title, result.plan), *lines)


def export_remarks(plan: BundlePlan) -> list[str]:
    """That a target's name stands for another's layout."""
    target = target_of(plan.options.target)
    if plan.options.target == target.name:
        return []
    return [
        f"--target {plan.options.target} is an alias: it reads the layout of"
        f" --target {target.name}, and that is what was planned or written."
    ]


def inspection_table(inspection: Inspection) -> Table:
    """What a checkpoint holds, part by part and role by role."""
    table = RichTable(title=str(inspection.folder), title_justify="left")
    for name in ("part", "role", "dtype"):
        table.add_column(name)
    for name in ("tensors", "parameters", "bytes"):
        table.add_column(name, justify="right")
    for amount in inspection.amounts:
        table.add_row(
            amount.part,
            amount.role,
            amount.dtype,
            f"{amount.tensors:,}",
            f"{amount.parameters:,}",
            format_bytes(amount.size_bytes),
        )
    total_bytes = format_bytes(sum(amount.size_bytes for amount in inspection.amounts))
    total = sum(amount.parameters for amount in inspection.amounts)
    tensors = sum(amount.tensors for amount in inspection.amounts)
    table.add_section()
    table.add_row("all", "", "", f"{tensors:,}", f"{total:,}", total_bytes)
    return Group(table, *_inspection_lines(inspection))


def _inspection_lines(inspection: Inspection) -> list[str]:
    layers = inspection.num_hidden_layers
    mtp = ", ".join(map(str, inspection.mtp_layers)) or "none"
    lines = [
        f"Model {inspection.model_type}: layers 0 to {layers - 1}; MTP layers: {mtp}.",
        f"Quantization: {inspection.quantization}. {inspection.shards} shards.",
        f"Parts in this folder: {', '.join(inspection.parts)}.",
    ]
    if inspection.mtp_layers and "mtp" not in inspection.parts:
        lines.append("config.json promises the MTP layers, but this folder does not hold them.")
    lines += [f"{name}: {state}." for name, state in inspection.shared_tensors.items()]
    lines += [f"Missing file: {name}." for name in inspection.missing_files]
    lines += [
        f"Problem: {p.tensor}: {p.problem} (expected {p.expected}, found {p.found})."
        for p in inspection.problems[:10]
    ]
    if len(inspection.problems) > 10:
        lines.append(f"... and {len(inspection.problems) - 10} problems more.")
    return lines
