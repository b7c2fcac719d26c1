"""mtp-export quantize: make a bundle with each part in a precision of its own."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Group, RenderableType

from mtp_checkpoints.families.base import Role
from mtp_checkpoints.formats import GGUF, WeightFormat, mixes_groups_with_fp8
from mtp_checkpoints.layouts import target_of
from mtp_checkpoints.sources.byte_source import Place
from mtp_export.bundle.build import BundleResult
from mtp_export.bundle.bundle_plan import BundlePlan
from mtp_export.bundle.options import Part
from mtp_export.bundle.precision import Format, Precision
from mtp_export.bundle.quantize import QuantizeOptions, default_input, default_output, plan_quantize
from mtp_export.calibrate.options import CalibrationOptions
from mtp_export.commands.bundle_command import (
    PART,
    Making,
    PlannedBundle,
    command_of,
    given_once,
)
from mtp_export.commands.bundle_tables import effort, resumed, size_lines
from mtp_export.commands.bundle_tables import result_facts as bundle_facts
from mtp_export.commands.calibration import (
    Calibrating,
    calibration_facts,
    calibration_lines,
    request_of,
    work_folder,
)
from mtp_export.commands.garbage import gc_paused
from mtp_export.commands.output import FiguresTable, heading, json_text, print_result
from mtp_export.commands.precision_table import pairs_facts, pairs_table
from mtp_export.options import (
    Access,
    Panel,
    argument,
    option,
    parse_source,
    path_option,
    source_option,
)
from mtp_export.paths import refuse_overlaps
from mtp_export.plan import Step
from mtp_export.progress import counted
from mtp_export.schemes import SCHEMES
from mtp_export.schemes.gguf_forms import Reform
from mtp_export.schemes.gguf_transforms import SplitLatentUp
from mtp_export.schemes.transforms import Convert

_WORST_TENSORS = 3


@dataclass(frozen=True)
class QuantizeCommand:
    """Options of mtp-export quantize."""

    source: Place | None = field(
        default=None,
        metadata=argument("The same as --input-dir.", "BUNDLE", parse_source, Access.READ),
    )
    input_dir: Place | None = field(
        default=None,
        metadata=source_option(
            "Bundle or checkpoint, or hf://org/name\\[@revision]; by default the current folder, if"
            " it is a bundle."
        ),
    )
    output_dir: Path | None = field(
        default=None,
        metadata=path_option(
            "Bundle to write; by default beside the input, named after the pair of schemes.",
            Panel.INPUT_OUTPUT,
            "DIR",
            access=Access.WRITTEN,
        ),
    )
    part: Part = field(default=Part.BOTH, metadata=PART)
    making: Making = Making()
    precision: Precision = Precision()
    calibration: CalibrationOptions = CalibrationOptions()
    list_pairs: bool = field(
        default=False,
        metadata=option(
            "Show the precision table and exit.", Panel.PRECISION, "--list", shows_and_exits=True
        ),
    )


def quantize(options: QuantizeCommand) -> None:
    """Quantize a checkpoint or a bundle: main model and MTP module each in its own precision."""
    making = options.making
    if options.list_pairs:
        facts = pairs_facts()
        reports = making.try_reports()
        reports.write({"--report": lambda: json_text(facts)})
        print_result(facts, pairs_table(), making.reporting)
        return
    output, opened = options.output_dir, None
    given = given_once("The input", options.source, "--input-dir", options.input_dir)
    source = given or default_input()
    if output is None and not (making.dry_run and not isinstance(source, Path)):
        output, opened = default_output(source, options.precision, making.target)
    command = command_of("quantize", replace(options, input_dir=source))
    bundle = making.bundle(source, output, options.part, command=command)
    chosen = QuantizeOptions(bundle, **vars(options.precision))
    work = work_folder(options.calibration, bundle.output_dir)
    refuse_overlaps(
        {"the input": source, "--calibrate": options.calibration.calibrate},
        {
            "the output": bundle.output_dir,
            "--report": making.report,
            "--imatrix": options.calibration.imatrix,
            **work,
        },
    )
    options.calibration.check()
    reports = making.try_reports()
    with gc_paused():
        plan = plan_quantize(chosen, opened, dry_run=making.dry_run)
    calibrating = Calibrating.of(plan, options.calibration, making)
    plan = calibrating.plan
    said = [*remarks(plan), *calibrating.remarks(dry_run=making.dry_run)]
    request = request_of(chosen, options.calibration)
    planned = PlannedBundle(request, making, plan, reports, said, calibrating.maker)
    result = planned.run()
    if result is not None:
        planned.report(result_facts(result), result_table(result))


def result_facts(result: BundleResult) -> dict[str, Any]:
    """Return the result of a quantization: sizes, SQNR by role, worst tensors, seconds, and what a
    calibration gained."""
    return bundle_facts(result) | {
        "sqnr_db": _by_role(result),
        "worst": _worst(result),
        **calibration_facts(result),
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
        *size_lines(result.plan.sizes),
        effort(result),
        *(
            f"Worst: {w['tensor']}: {_decibels(w['sqnr_db'])} as {w['storage']}; verify asks for"
            f" {w['least_db']:.0f} dB or more."
            for w in facts["worst"][:1]
        ),
        *calibration_lines(facts),
        *resumed(result),
    ]
    return Group(heading(f"Quantized to {facts['output_dir']}"), table, *lines)


def remarks(plan: BundlePlan) -> list[str]:
    """Return remarks on the bundle that its figures do not show."""
    recorded = plan.recorded
    lines = [*_dialect_remarks(plan), *_fallback_remarks(plan)]
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
    if not mixes_groups_with_fp8(scheme.recorded_storages(recorded)):
        return []
    engines = [e for e in target_of(chosen).engines if e.title and e.dialect is not None]
    written_for = [e.title for e in engines if e.dialect and e.dialect.name == recorded["reader"]]
    others = [
        e
        for e in engines
        if e.dialect and e.dialect.own_config and e.dialect.name != recorded["reader"]
    ]
    formats = scheme.variants.get("format", {})
    format = f" or --format {Format.W4AFP8}" if Format.W4AFP8 in formats else ""
    return [
        f"--target {chosen} writes int4 beside fp8 as {' and '.join(written_for)} reads it;"
        f" {other.title} needs --target {other.name}{format}."
        for other in others
    ]


def _fallback_remarks(plan: BundlePlan) -> list[str]:
    """Return a remark per format that stands in another's place, for rows that the blocks of that
    one do not divide."""
    replaced: dict[tuple[str, str], list[str]] = {}
    for step in plan.written_steps:
        if step.scheme is None or SCHEMES[step.scheme].container != GGUF:
            continue
        role = plan.stored.weight_of[step.inputs[0]].weight.role
        wanted = SCHEMES[step.scheme].with_tables.get(role)
        for name, found in _formats_of(step).items():
            if found.storage != wanted:
                replaced.setdefault((str(wanted), found.storage), []).append(name)
    return [
        f"{counted(len(names), 'tensor')} in {found} in place of {wanted}, whose blocks do not"
        f" divide the rows: {names[0]}{', and others' if names[1:] else ''}."
        for (wanted, found), names in replaced.items()
    ]


def _formats_of(step: Step) -> dict[str, WeightFormat]:
    """Return the formats of what a step converts, by the names of the tensors with the codes."""
    operation, names = step.operation, [output.name for output in step.outputs]
    if isinstance(operation, SplitLatentUp):
        return dict(zip(names, operation.formats, strict=True))
    if isinstance(operation, Reform):
        return dict.fromkeys(names, operation.format)
    return {names[0]: operation.format} if isinstance(operation, Convert) else {}


def _decibels(value: float | None) -> str:
    return "exact" if value is None else f"{value:.1f} dB"


def _computed(result: BundleResult) -> list[tuple[str, Role, float | None, float]]:
    """Return tensor, role, SQNR in dB (None: exact) and maximum error of every converted tensor of
    the main and the MTP part."""
    expected, facts = result.plan.family.tensors, result.facts
    return [
        (name, expected[step.inputs[0]].role, facts[name]["sqnr_db"], facts[name]["max_error"])
        for step in result.plan.written_steps
        if step.inputs[0] in expected and "sqnr_db" in facts.get(name := step.outputs[0].name, ())
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
    """Return the tensors with the lowest SQNR, each with its format and the least that verify
    accepts of one."""
    known = [(sqnr, name) for name, _, sqnr, _ in _computed(result) if sqnr is not None]
    worst = sorted(known)[:_WORST_TENSORS]
    names = {name for _, name in worst}
    formats = {
        name: own
        for step in result.plan.written_steps
        if step.outputs[0].name in names
        for name, own in _formats_of(step).items()
    }
    return [
        {
            "tensor": name,
            "sqnr_db": round(sqnr, 2),
            "storage": formats[name].storage,
            "least_db": formats[name].gate.sqnr_db,
        }
        for sqnr, name in worst
    ]
