"""mtp-export quantize: make a bundle with each part in a precision of its own."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType

from mtp_checkpoints.families.base import Role
from mtp_checkpoints.formats.storage import mixes_integers_with_fp8
from mtp_checkpoints.layouts import target_of
from mtp_checkpoints.sources.byte_source import Place
from mtp_export.bundle.build import BundleResult
from mtp_export.bundle.bundle_plan import BundlePlan
from mtp_export.bundle.options import DEFAULT_WORKERS, Checksums, Part, SharedWeights
from mtp_export.bundle.quantize import (
    Device,
    Format,
    Int4Scope,
    QuantizeOptions,
    ScaleRule,
    default_input,
    default_output,
)
from mtp_export.bundle.request import Request
from mtp_export.commands import options as shared
from mtp_export.commands.bundle_command import BundleCommand, make_bundle
from mtp_export.commands.bundle_tables import effort, resumed
from mtp_export.commands.bundle_tables import result_facts as bundle_facts
from mtp_export.commands.output import FiguresTable, heading, json_text, print_result
from mtp_export.commands.precision_table import pairs_facts, pairs_table
from mtp_export.commands.report_files import try_reports
from mtp_export.plan import Link
from mtp_export.progress import format_bytes
from mtp_export.schemes import SCHEMES
from mtp_export.schemes.scheme import KEEP

_NAMES = (*SCHEMES, KEEP)
# Every pair of the table gives the MTP module 8 bits or more.
_MTP_NAMES = tuple(name for name in _NAMES if "int4" not in name)
BaseQuant = StrEnum("BaseQuant", {name: name for name in _NAMES})  # type: ignore[misc]
MtpQuant = StrEnum("MtpQuant", {name: name for name in _MTP_NAMES})  # type: ignore[misc]
_KEEP_BASE, _KEEP_MTP = BaseQuant(KEEP), MtpQuant(KEEP)
_WORST_TENSORS = 3

InputDir = Annotated[
    Place | None,
    shared.source_option(
        "Bundle or checkpoint, or hf://org/name\\[@revision]; by default the current folder, if it"
        " is a bundle."
    ),
]
OutputDir = Annotated[
    Path | None,
    typer.Option(
        parser=shared.parse_path,
        metavar="DIR",
        rich_help_panel=shared.INPUT_OUTPUT,
        help="Bundle to write; by default beside the input, named after the pair of schemes.",
    ),
]
BaseQuantOption = Annotated[
    BaseQuant,
    typer.Option(
        "--base-quant",
        metavar="SCHEME",
        rich_help_panel=shared.PRECISION,
        help=f"Precision of the main model: {', '.join(_NAMES)}.",
    ),
]
MtpQuantOption = Annotated[
    MtpQuant,
    typer.Option(
        "--mtp-quant",
        metavar="SCHEME",
        rich_help_panel=shared.PRECISION,
        help=f"Precision of the MTP module: {', '.join(_MTP_NAMES)}.",
    ),
]
FormatOption = Annotated[
    Format,
    typer.Option(
        "--format",
        metavar="NAME",
        rich_help_panel=shared.PRECISION,
        help="Layout of a8w8_fp8_wint4: compressed-tensors or w4afp8.",
    ),
]
GroupSize = Annotated[
    int,
    typer.Option(
        "--group-size",
        metavar="N",
        rich_help_panel=shared.PRECISION,
        help="Weights per int4 scale: 32, 64 or 128.",
    ),
]
Int4ScopeOption = Annotated[
    Int4Scope,
    typer.Option(
        "--int4-scope",
        metavar="SCOPE",
        rich_help_panel=shared.PRECISION,
        help="Linears that weight_only_int4 packs: experts or all.",
    ),
]
ScaleOption = Annotated[
    ScaleRule,
    typer.Option(
        "--scale",
        metavar="RULE",
        rich_help_panel=shared.PRECISION,
        help="Choice of an int4 scale: minmax or mse.",
    ),
]
AllowUntestedPair = Annotated[
    bool,
    typer.Option(
        "--allow-untested-pair",
        rich_help_panel=shared.PRECISION,
        help="Accept a pair of schemes that is not in the precision table.",
    ),
]
ListPairs = Annotated[
    bool,
    typer.Option(
        "--list", rich_help_panel=shared.PRECISION, help="Show the precision table and exit."
    ),
]
DeviceOption = Annotated[
    Device,
    typer.Option(
        "--device",
        metavar="NAME",
        rich_help_panel=shared.PERFORMANCE,
        help="Device that computes: cpu, cuda, npu or auto.",
    ),
]


def quantize(
    context: typer.Context,
    input_dir: InputDir = None,
    output_dir: OutputDir = None,
    link: shared.LinkOption = Link.AUTO,
    overwrite: shared.Overwrite = False,
    no_resume: shared.NoResume = False,
    dry_run: shared.DryRun = False,
    base_quant: BaseQuantOption = _KEEP_BASE,
    mtp_quant: MtpQuantOption = _KEEP_MTP,
    format: FormatOption = Format.COMPRESSED_TENSORS,
    group_size: GroupSize = 128,
    int4_scope: Int4ScopeOption = Int4Scope.EXPERTS,
    scale: ScaleOption = ScaleRule.MINMAX,
    allow_untested_pair: AllowUntestedPair = False,
    list_pairs: ListPairs = False,
    part: shared.PartOption = Part.BOTH,
    target: shared.TargetOption = "hf",
    shared_weights: shared.SharedWeightsOption = SharedWeights.KEEP,
    allow_untied: shared.AllowUntied = False,
    max_shard_size: shared.MaxShardSize = shared.DEFAULT_MAX_SHARD_SIZE,
    checksums: shared.ChecksumsOption = Checksums.WRITTEN,
    share: shared.ShareOption = None,
    cluster: shared.ClusterOption = None,
    workers: shared.Workers = DEFAULT_WORKERS,
    io_depth: shared.IoDepth = None,
    max_memory: shared.MaxMemory = shared.DEFAULT_MAX_MEMORY,
    device: DeviceOption = Device.CPU,
    report: shared.Report = None,
    as_json: shared.AsJson = False,
    quiet: shared.Quiet = False,
    debug: shared.Debug = False,
) -> None:
    """Quantize a checkpoint or a bundle: main model and MTP module each in its own precision."""
    if list_pairs:
        facts = pairs_facts()
        try_reports({"--report": report}, []).write({"--report": lambda: json_text(facts)})
        print_result(facts, pairs_table(), shared.reporting_options(context))
        return
    source = input_dir or default_input()
    output = output_dir or default_output(source, base_quant, mtp_quant)
    options = _quantize_options(context, source, output)
    make_bundle(COMMAND, context, Request("quantize", options))


def _quantize_options(context: typer.Context, source: Place, output: Path) -> QuantizeOptions:
    given = context.params
    return QuantizeOptions(
        bundle=shared.bundle_options(context, source, output),
        base_quant=given["base_quant"],
        mtp_quant=given["mtp_quant"],
        format=given["format"],
        group_size=given["group_size"],
        int4_scope=given["int4_scope"],
        scale=given["scale"],
        device=given["device"],
        allow_untested_pair=given["allow_untested_pair"],
    )


def result_facts(result: BundleResult) -> dict[str, Any]:
    """Return the result of a quantization: bytes, SQNR by role, worst tensors, seconds."""
    before, after = _bytes_before_and_after(result.plan)
    return bundle_facts(result) | {
        "bytes_before": before,
        "bytes_after": after,
        "sqnr_db": _by_role(result),
        "worst": _worst(result),
    }


def result_table(result: BundleResult) -> RenderableType:
    """Return the result of a quantization for people."""
    facts = result_facts(result)
    table = FiguresTable()
    table.add_words("role")
    table.add_figures("tensors", "SQNR min", "median", "largest error")
    for role, quality in facts["sqnr_db"].items():
        table.add_row(
            role,
            f"{quality['tensors']:,}",
            _decibels(quality["min"]),
            _decibels(quality["median"]),
            f"{quality['max_error']:.2g}",
        )
    lines = [
        f"{format_bytes(facts['bytes_before'])} before,"
        f" {format_bytes(facts['bytes_after'])} after; {effort(result)}",
        *(f"Worst: {w['tensor']}: {_decibels(w['sqnr_db'])}." for w in facts["worst"]),
        *resumed(result),
    ]
    return Group(heading(f"Quantized to {facts['output_dir']}"), table, *lines)


def remarks(plan: BundlePlan) -> list[str]:
    """Return remarks on the bundle that its figures do not show."""
    recorded = plan.recorded
    lines = _dialect_remarks(plan)
    if not recorded["pair_in_table"]:
        lines.append(
            f"The pair {recorded['base_quant']} + {recorded['mtp_quant']} is outside the precision"
            " table; the manifest says so."
        )
    return lines


def _dialect_remarks(plan: BundlePlan) -> list[str]:
    """Return a remark per engine that wants integers beside fp8 in another dialect."""
    recorded, chosen = plan.recorded, plan.options.target
    scheme = SCHEMES[recorded["base_quant"]]
    if not mixes_integers_with_fp8(scheme.recorded_storages(recorded)):
        return []
    engines = [e for e in target_of(chosen).engines if e.title and e.dialect is not None]
    written_for = [e.title for e in engines if e.dialect and e.dialect.name == recorded["reader"]]
    others = [
        e
        for e in engines
        if e.dialect and e.dialect.own_config and e.dialect.name != recorded["reader"]
    ]
    format = f" or --format {Format.W4AFP8}" if Format.W4AFP8 in scheme.variants else ""
    return [
        f"--target {chosen} writes int4 beside fp8 as {' and '.join(written_for)} reads it;"
        f" {other.title} needs --target {other.name}{format}."
        for other in others
    ]


def _decibels(value: float | None) -> str:
    return "exact" if value is None else f"{value:.1f} dB"


def _bytes_before_and_after(plan: BundlePlan) -> tuple[int, int]:
    """Return the bytes of the parts' source tensors, and of the parts' own."""
    sources = plan.checkpoint.tensors
    steps = [step for part in plan.parts for shard in part.shards for step in shard.steps]
    before = sum(sources[name].size_bytes for step in steps for name in step.inputs)
    return before, sum(step.size_bytes for step in steps)


def _computed(result: BundleResult) -> list[tuple[str, Role, float | None, float]]:
    """Return tensor, role, SQNR in dB (None: exact) and maximum error of every converted tensor."""
    expected, facts = result.plan.family.tensors, result.facts
    return [
        (name, expected[step.inputs[0]].role, facts[name]["sqnr_db"], facts[name]["max_error"])
        for step in result.plan.written_steps
        if (name := step.outputs[0].name) in facts
    ]


def _by_role(result: BundleResult) -> dict[str, dict[str, Any]]:
    """Return lowest and median SQNR in dB per role; None where every tensor is exact."""
    rows = _computed(result)
    summary: dict[str, dict[str, Any]] = {}
    for role in Role:
        of_role = [row for row in rows if row[1] is role]
        if not of_role:
            continue
        known = [sqnr for _, _, sqnr, _ in of_role if sqnr is not None]
        summary[str(role)] = {
            "tensors": len(of_role),
            "min": round(min(known), 2) if known else None,
            "median": round(median(known), 2) if known else None,
            "max_error": max(row[3] for row in of_role),
        }
    return summary


def _worst(result: BundleResult) -> list[dict[str, Any]]:
    known = [(sqnr, name) for name, _, sqnr, _ in _computed(result) if sqnr is not None]
    return [
        {"tensor": name, "sqnr_db": round(sqnr, 2)} for sqnr, name in sorted(known)[:_WORST_TENSORS]
    ]


COMMAND = BundleCommand(name="quantize", facts=result_facts, table=result_table, remarks=remarks)
