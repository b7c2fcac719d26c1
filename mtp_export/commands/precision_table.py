"""Precision table: the supported pairs of schemes, for people and as facts for machines."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType

from mtp_checkpoints.families import family_of
from mtp_checkpoints.families.released import DEEPSEEK_V3
from mtp_export.commands.output import FiguresTable, heading
from mtp_export.progress import format_bytes
from mtp_export.schemes import SCHEMES
from mtp_export.schemes.table import PAIRS, weigh


def pairs_facts() -> dict[str, Any]:
    """Return the supported pairs with bytes and bits per weight of DeepSeek-V3, from its shapes."""
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


def pairs_table() -> RenderableType:
    """Return the supported pairs for people."""
    table = FiguresTable(box=SIMPLE_HEAD)
    table.pad_edge = table.show_edge = False
    table.show_lines = True
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
        heading("Precision of base (above) and MTP module (below)"),
        table,
        "Bits per weight and the size of DeepSeek-V3 are the whole part's, with scales, embedding"
        " and head.\nint4 and int8 are compressed-tensors' pack-quantized, nvfp4, mxfp4 and"
        " mxfp8 its layouts\nof these names; int4 + fp8 also --format w4afp8, nvfp4 --format"
        " modelopt.\nEngines are those whose loaders"
        " read the layout, by their sources.",
    )
