"""mtp-export graft: give a quantized main model that lost its MTP layer the original's."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group, RenderableType

from mtp_checkpoints.quantization.native import DTYPE_KEYS
from mtp_checkpoints.sources.byte_source import Place
from mtp_export.bundle.build import BundleResult
from mtp_export.bundle.bundle_plan import BundlePlan
from mtp_export.bundle.graft import GraftOptions
from mtp_export.bundle.options import Checksums, SharedWeights
from mtp_export.bundle.request import Request
from mtp_export.commands import options as shared
from mtp_export.commands.bundle_command import BundleCommand, make_bundle
from mtp_export.commands.bundle_tables import effort, parts_table, result_facts, resumed
from mtp_export.commands.output import heading
from mtp_export.plan import Link
from mtp_export.schemes import SCHEMES
from mtp_export.schemes.scheme import BF16

# As for mtp-export quantize: every pair of its table gives the MTP module 8 bits or more.
_NAMES = tuple(name for name in SCHEMES if "int4" not in name)
GraftQuant = StrEnum("GraftQuant", {name: name for name in _NAMES})  # type: ignore[misc]
_BF16 = GraftQuant(BF16)

Main = Annotated[
    Place,
    shared.source_option(
        "Quantized main model without an MTP layer: a folder, or hf://org/name\\[@revision].",
        "--main",
    ),
]
Mtp = Annotated[
    Place,
    shared.source_option(
        "Checkpoint that it was made from, with the MTP layer: a folder, or an address.", "--mtp"
    ),
]
OutputDir = Annotated[
    Path,
    typer.Option(
        parser=shared.parse_path,
        metavar="DIR",
        rich_help_panel=shared.INPUT_OUTPUT,
        help="Bundle to write: main/, mtp/ and mtp_export.json in this folder.",
    ),
]
MtpQuant = Annotated[
    GraftQuant,
    typer.Option(
        "--mtp-quant",
        metavar="SCHEME",
        rich_help_panel=shared.PRECISION,
        help=f"Precision of the MTP module: {', '.join(_NAMES)}.",
    ),
]


def graft(
    context: typer.Context,
    main: Main,
    mtp: Mtp,
    output_dir: OutputDir,
    link: shared.LinkOption = Link.AUTO,
    overwrite: shared.Overwrite = False,
    no_resume: shared.NoResume = False,
    dry_run: shared.DryRun = False,
    mtp_quant: MtpQuant = _BF16,
    target: shared.TargetOption = "hf",
    shared_weights: shared.SharedWeightsOption = SharedWeights.KEEP,
    allow_untied: shared.AllowUntied = False,
    max_shard_size: shared.MaxShardSize = shared.DEFAULT_MAX_SHARD_SIZE,
    checksums: shared.ChecksumsOption = Checksums.WRITTEN,
    share: shared.ShareOption = None,
    cluster: shared.ClusterOption = None,
    workers: shared.Workers = shared.DEFAULT_WORKERS,
    max_memory: shared.MaxMemory = shared.DEFAULT_MAX_MEMORY,
    io_depth: shared.IoDepth = None,
    report: shared.Report = None,
    as_json: shared.AsJson = False,
    quiet: shared.Quiet = False,
    debug: shared.Debug = False,
) -> None:
    """Graft the original's MTP layer onto a main model that others quantized without it."""
    options = GraftOptions(shared.bundle_options(context, main, output_dir), mtp, mtp_quant)
    make_bundle(COMMAND, context, Request("graft", options), others=(mtp,))


def result_table(result: BundleResult) -> RenderableType:
    """Return the result of a graft for people."""
    title = heading(f"Grafted to {result.plan.options.output_dir}")
    return Group(title, parts_table(result.plan), effort(result), *resumed(result))


def remarks(plan: BundlePlan) -> list[str]:
    """Return a remark on parts of different dtypes, which engines convert as they load them."""
    main, mtp = (
        next((part.config[key] for key in DTYPE_KEYS if key in part.config), None)
        for part in plan.parts
    )
    if main == mtp:
        return []
    return [
        f"The main model computes in {main}; its draft is stored in {mtp}, which engines round."
    ]


COMMAND = BundleCommand(name="graft", facts=result_facts, table=result_table, remarks=remarks)
