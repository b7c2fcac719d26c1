"""The precision table, and what a quantization did, for people and as facts for machines."""

from __future__ import annotations

from statistics import median
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table as RichTable

from mtp_export.bundle.build import BundlePlan, BundleResult
from mtp_export.commands import tables
from mtp_export.commands.tables import Table
from mtp_export.families import family_of
from mtp_export.families.base import Role
from mtp_export.families.released import DEEPSEEK_V3
from mtp_export.progress import format_bytes
from mtp_export.schemes import SCHEMES
from mtp_export.schemes.table import PAIRS, weigh

_WORST = 3


def pairs_facts() -> dict[str, Any]:
    """The supported pairs with the bytes and bits a weight of DeepSeek-V3, from its shapes."""
    family = family_of(DEEPSEEK_V3)
    rows = []
    for pair in PAIRS:
        base = weigh(family, pair.base, lambda spec: spec.mtp_layer is None)
        mtp = weigh(family, pair.mtp, lambda spec: spec.mtp_layer is not None)
        rows.append(
            {
                "base": pair.base,
                "mtp": pair.mtp,
                "format": {
                    "base": SCHEMES[pair.base].on_disk,
                    "mtp": SCHEMES[pair.mtp].on_disk,
                },
                "bits_per_weight": {
                    "base": round(base.bits_per_weight, 2),
                    "mtp": round(mtp.bits_per_weight, 2),
                },
                "v3_bytes": {"base": base.size_bytes, "mtp": mtp.size_bytes},
                "engines": list(pair.engines),
                "deployment": pair.deployment,
            }
        )
    return {"pairs": rows}


def pairs_table() -> Table:
    """The supported pairs for people."""
    title = "Precision of base (above) and MTP module (below)"
    table = RichTable(title=title, title_justify="left", box=SIMPLE_HEAD)
    table.pad_edge = table.show_edge = False
    for name in ("precision", "on disk", "bits", "V3", "engines", "GPUs"):
        table.add_column(name, no_wrap=True)
    for row in pairs_facts()["pairs"]:
        bits, sizes = row["bits_per_weight"], row["v3_bytes"]
        table.add_row(
            f"{row['base']}\n{row['mtp']}",
            f"{row['format']['base']}\n{row['format']['mtp']}",
            f"{bits['base']:.2f}\n{bits['mtp']:.2f}",
            f"{format_bytes(sizes['base'])}\n{format_bytes(sizes['mtp'])}",
            "\n".join(row["engines"]),
            row["deployment"],
        )
    return Group(
        table,
        "Bits a weight and the size of DeepSeek-V3 are the whole part's, with scales, embedding and"
        " head.\nint4 and int8 are compressed-tensors' pack-quantized; int4 + fp8 also --format"
        " w4afp8.\nEngines are those whose loaders read the layout, by their sources.",
    )


def result_facts(result: BundleResult) -> dict[str, Any]:
    """What a quantization did: bytes, SQNR by role, the worst tensors, seconds."""
    before, after = _bytes_before_and_after(result.plan)
    return tables.result_facts(result) | {
        "bytes_before": before,
        "bytes_after": after,
        "sqnr_db": _by_role(result),
        "worst": _worst(result),
    }


def result_table(result: BundleResult) -> Table:
    """The end of a quantization."""
    facts = result_facts(result)
    table = RichTable(title=f"Quantized to {facts['output_dir']}", title_justify="left")
    table.add_column("role")
    for name in ("tensors", "SQNR min", "median", "largest error"):
        table.add_column(name, justify="right")
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
        f" {format_bytes(facts['bytes_after'])} after; {tables.effort(result)}",
        *(f"Worst: {w['tensor']}: {_decibels(w['sqnr_db'])}." for w in facts["worst"]),
    ]
    if result.resumed_shards:
        lines.append(f"{result.resumed_shards} shards were finished by an earlier run.")
    return Group(table, *lines)


def remarks(plan: BundlePlan) -> list[str]:
    """What the reader of a plan or result must know beside the figures."""
    recorded = plan.recorded
    lines = []
    is_wint4 = (recorded["base_quant"], recorded["format"]) == (
        "a8w8_fp8_wint4",
        "compressed-tensors",
    )
    if is_wint4 and recorded["reader"] == "vllm":
        lines.append(
            f"--target {plan.options.target} writes int4 beside fp8 as vLLM reads it; SGLang wants"
            " --target sglang or --format w4afp8."
        )
    if not recorded["pair_in_table"]:
        lines.append(
            f"The pair {recorded['base_quant']} + {recorded['mtp_quant']} is outside the precision"
            " table; the manifest says so."
        )
    return lines


def _decibels(value: float | None) -> str:
    return "exact" if value is None else f"{value:.1f} dB"


def _bytes_before_and_after(plan: BundlePlan) -> tuple[int, int]:
    """Bytes of the tensors that the parts are made of, and of those they hold."""
    sources = plan.checkpoint.tensors
    steps = [step for part in plan.parts for shard in part.shards for step in shard.steps]
    before = sum(sources[name].size_bytes for step in steps for name in step.inputs)
    return before, sum(step.size_bytes for step in steps)


def _computed(result: BundleResult) -> list[tuple[str, Role, float | None, float]]:
    """Tensor, role, SQNR (None: exact) and largest error of everything that was converted."""
    expected, facts = result.plan.family.tensors, result.facts
    return [
        (name, expected[step.inputs[0]].role, facts[name]["sqnr_db"], facts[name]["max_error"])
        for step in result.plan.written_steps
        if (name := step.outputs[0].name) in facts
    ]


def _by_role(result: BundleResult) -> dict[str, dict[str, Any]]:
    """Per role: lowest and median SQNR in dB; None where every tensor is exact."""
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
    return [{"tensor": name, "sqnr_db": round(sqnr, 2)} for sqnr, name in sorted(known)[:_WORST]]
