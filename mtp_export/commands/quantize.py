"""mtp-export quantize: options in, one call into the core, tables or JSON out."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from mtp_export.bundle.build import BundleOptions
from mtp_export.bundle.quantize import (
    KEEP,
    Device,
    Format,
    Int4Scope,
    QuantizeOptions,
    ScaleRule,
    default_input,
    default_output,
    plan_quantize,
)
from mtp_export.bundle.split import Checksums, Part, SharedWeights
from mtp_export.checkpoint.plan import Link
from mtp_export.commands import options as common
from mtp_export.commands import precision_tables
from mtp_export.commands.bundling import Command, Saying, carry_out
from mtp_export.commands.output import say
from mtp_export.schemes import SCHEMES

_NAMES = (*SCHEMES, KEEP)
BaseQuant = StrEnum("BaseQuant", {name: name for name in _NAMES})  # type: ignore[misc]
# Every pair of the table gives the MTP module 8 bits or more.
MtpQuant = StrEnum(  # type: ignore[misc]
    "MtpQuant", {name: name for name in _NAMES if "int4" not in name}
)
_KEEP_BASE, _KEEP_MTP = BaseQuant(KEEP), MtpQuant(KEEP)

_InputDir = Annotated[
    Path | None,
    typer.Option("--input-dir", help="Bundle or checkpoint. The current folder, if a bundle."),
]
_OutputDir = Annotated[
    Path | None,
    typer.Option("--output-dir", help="The new bundle. A sibling named after the pair."),
]
_BaseQuant = Annotated[BaseQuant, typer.Option("--base-quant", help="Precision of the main model.")]
_MtpQuant = Annotated[MtpQuant, typer.Option("--mtp-quant", help="Precision of the MTP module.")]
_Format = Annotated[Format, typer.Option("--format", help="Layout of a8w8_fp8_wint4.")]
_GroupSize = Annotated[
    int, typer.Option("--group-size", help="Weights per int4 scale: 32, 64 or 128.")
]
_Int4Scope = Annotated[Int4Scope, typer.Option("--int4-scope", help="What weight_only_int4 packs.")]
_Scale = Annotated[ScaleRule, typer.Option("--scale", help="How an int4 scale is chosen.")]
_Device = Annotated[Device, typer.Option("--device", help="Where to compute.")]
_AllowPair = Annotated[
    bool, typer.Option("--allow-untested-pair", help="Build a pair outside the table.")
]
_List = Annotated[bool, typer.Option("--list", help="Show the precision table.")]

_QUANTIZE = Command(
    "quantize",
    precision_tables.result_facts,
    precision_tables.result_table,
    precision_tables.remarks,
)


def quantize(
    input_dir: _InputDir = None,
    output_dir: _OutputDir = None,
    base_quant: _BaseQuant = _KEEP_BASE,
    mtp_quant: _MtpQuant = _KEEP_MTP,
    format: _Format = Format.COMPRESSED_TENSORS,
    group_size: _GroupSize = 128,
    int4_scope: _Int4Scope = Int4Scope.EXPERTS,
    scale: _Scale = ScaleRule.MINMAX,
    device: _Device = Device.CPU,
    allow_untested_pair: _AllowPair = False,
    list_pairs: _List = False,
    part: common.PartOption = Part.BOTH,
    target: common.TargetOption = "hf",
    shared_weights: common.SharedWeightsOption = SharedWeights.KEEP,
    allow_untied: common.AllowUntied = False,
    link: common.LinkOption = Link.AUTO,
    checksums: common.ChecksumsOption = Checksums.WRITTEN,
    workers: common.Workers = common.DEFAULT_WORKERS,
    max_memory: common.MaxMemory = "4GiB",  # type: ignore[assignment]
    max_shard_size: common.MaxShardSize = "5GB",  # type: ignore[assignment]
    dry_run: common.DryRun = False,
    overwrite: common.Overwrite = False,
    no_resume: common.NoResume = False,
    report: common.Report = None,
    as_json: common.AsJson = False,
    quiet: common.Quiet = False,
    debug: common.Debug = False,
) -> None:
    """Quantize a bundle or a checkpoint: main model and MTP module each in its precision."""
    if list_pairs:
        say(precision_tables.pairs_facts(), precision_tables.pairs_table(), report, as_json, quiet)
        return
    source = input_dir or default_input()
    output = output_dir or default_output(source, base_quant, mtp_quant)
    bundle = BundleOptions(
        source, output, part, target, shared_weights, link, workers, max_memory, max_shard_size,
        overwrite, not no_resume, allow_untied, checksums,
    )  # fmt: skip
    options = QuantizeOptions(
        bundle, base_quant, mtp_quant, format, group_size, int4_scope, scale, device,
        allow_untested_pair,
    )  # fmt: skip
    saying = Saying(dry_run, report, as_json, quiet)
    carry_out(_QUANTIZE, lambda dry: plan_quantize(options, dry_run=dry), bundle, saying)
