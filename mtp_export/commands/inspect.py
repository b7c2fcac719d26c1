"""mtp-export inspect: show the contents of a checkpoint, from its headers alone."""

from __future__ import annotations

from dataclasses import dataclass, field

from rich.console import Group

from mtp_checkpoints.sources.byte_source import Place
from mtp_checkpoints.tensors.bundle_folder import MAIN, RELEASED
from mtp_export.commands.garbage import gc_paused
from mtp_export.commands.output import FiguresTable, QuietReporting, heading, print_result
from mtp_export.inspection import Inspection, parts_of_bundle
from mtp_export.inspection import inspect as inspect_checkpoint
from mtp_export.options import Access, argument, parse_source
from mtp_export.progress import counted, format_bytes

_SHOWN_PROBLEMS = 10


@dataclass(frozen=True)
class InspectCommand:
    """Options of mtp-export inspect."""

    source: Place = field(
        metadata=argument(
            "Checkpoint or bundle: a folder, or hf://org/name\\[@revision].",
            "SRC",
            parse_source,
            Access.READ,
        )
    )
    reporting: QuietReporting = QuietReporting()


def inspect(options: InspectCommand) -> None:
    """Show the contents of a checkpoint, from its headers alone."""
    source = options.source
    with gc_paused():
        parts = parts_of_bundle(source)
        found = {name: inspect_checkpoint(place) for name, place in parts.items()}
        inspection = None if found else inspect_checkpoint(source)
    if inspection is not None:
        print_result(inspection.as_json(), inspection_table(inspection), options.reporting)
        _refuse_problems(source, inspection)
        return
    facts = {
        "bundle": str(source),
        "parts": {name: each.as_json() for name, each in found.items()},
    }
    tables = (inspection_table(each).renderables for each in found.values())
    lines = [line for table in tables for line in ("", *table)]
    print_result(facts, Group(*lines[1:]), options.reporting)
    for name, each in found.items():
        _refuse_problems(parts[name], each)


def _refuse_problems(place: Place, inspection: Inspection) -> None:
    if inspection.problems:
        inspection.problems[0].raise_as_error(place, len(inspection.problems) - 1)


def inspection_table(inspection: Inspection) -> Group:
    """Return the contents of a checkpoint for people, by part and role."""
    table = FiguresTable()
    table.add_words("part", "role", "dtype")
    table.add_figures("tensors", "parameters", "bytes")
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
    return Group(heading(str(inspection.place)), table, *_inspection_lines(inspection))


def _inspection_lines(inspection: Inspection) -> list[str]:
    layers = inspection.num_hidden_layers
    mtp = ", ".join(map(str, inspection.mtp_layers)) or "none"
    if inspection.mtp_prefix and inspection.mtp_layers:
        mtp += f" ({inspection.mtp_prefix}.*)"
    model = f"Model {inspection.model_type}: layers 0 to {layers - 1}; MTP layers: {mtp}."
    if inspection.unknown:
        model += f" They are told by their names alone. {inspection.unknown}"
    if inspection.layout != RELEASED and MAIN not in inspection.parts:
        model = f"Model {inspection.model_type}: a draft as --target {inspection.layout} writes it."
    lines = [
        model,
        f"Quantization: {inspection.quantization}. {counted(inspection.shards, 'shard')}.",
        f"Parts in this folder: {', '.join(inspection.parts)}.",
    ]
    if inspection.mtp_layers and "mtp" not in inspection.parts:
        lines.append("config.json names MTP layers that are not in this folder.")
    lines += [f"{name}: {state}." for name, state in inspection.shared_tensors.items()]
    lines += [f"Missing file: {name}." for name in inspection.missing_files]
    lines += [
        f"Not in the index: {name}. Loaders that follow the index lose it; an export lists it."
        for name in inspection.unindexed_files
    ]
    lines += [
        f"Passed over: {name}, which repeats tensors of other files. It can be deleted."
        for name in inspection.repeated_files
    ]
    lines += [
        f"Passed over: {name}, which the index does not name, as none of its tensors is named."
        for name in inspection.stray_files
    ]
    lines += [
        f"Problem: {p.tensor}: {p.problem} (expected {p.expected}, found {p.found})."
        for p in inspection.problems[:_SHOWN_PROBLEMS]
    ]
    if len(inspection.problems) > _SHOWN_PROBLEMS:
        lines.append(f"... and {len(inspection.problems) - _SHOWN_PROBLEMS} more problems.")
    return lines
