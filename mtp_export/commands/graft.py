"""mtp-export graft: give a quantized main model that lost its MTP layer the original's."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Group, RenderableType

from mtp_checkpoints.errors import UsageError
from mtp_checkpoints.quantization.methods import undecoded_of
from mtp_checkpoints.quantization.native import DTYPE_KEYS
from mtp_checkpoints.sources.byte_source import Place
from mtp_export.bundle.build import BundleResult
from mtp_export.bundle.bundle_plan import BundlePlan
from mtp_export.bundle.graft import GraftOptions, plan_graft
from mtp_export.bundle.request import Request
from mtp_export.commands.bundle_command import (
    OUTPUT,
    Making,
    PlannedBundle,
    command_of,
    given_once,
)
from mtp_export.commands.bundle_tables import (
    effort,
    parts_table,
    result_facts,
    resumed,
    size_lines,
)
from mtp_export.commands.garbage import gc_paused
from mtp_export.commands.output import heading
from mtp_export.commands.pairing import Proving, with_pairing
from mtp_export.options import Access, Names, Panel, argument, option, parse_source, source_option
from mtp_export.schemes.scheme import BF16


@dataclass(frozen=True, kw_only=True)
class GraftCommand:
    """Options of mtp-export graft."""

    host: Place | None = field(
        default=None, metadata=argument("The same as --main.", "MAIN", parse_source, Access.READ)
    )
    donor: Place | None = field(
        default=None, metadata=argument("The same as --mtp.", "MTP", parse_source, Access.READ)
    )
    main: Place | None = field(
        default=None,
        metadata=source_option(
            "Quantized main model without an MTP layer: a folder, or hf://org/name\\[@revision].",
            "--main",
        ),
    )
    mtp: Place | None = field(
        default=None,
        metadata=source_option(
            "Checkpoint that it was made from, with the MTP layer: a folder, or an address.",
            "--mtp",
        ),
    )
    output_dir: Path | None = field(default=None, metadata=OUTPUT)
    replace: bool = field(
        default=False,
        metadata=option(
            "Put the layer in the place of one that the main model has.", Panel.INPUT_OUTPUT
        ),
    )
    making: Making = Making()
    mtp_quant: str = field(
        default=BF16,
        metadata=option(
            "Precision of the MTP module: {names}.",
            Panel.PRECISION,
            metavar="SCHEME",
            values=Names.GRAFT_SCHEME,
        ),
    )
    proving: Proving = Proving()


def graft(options: GraftCommand) -> None:
    """Graft the original's MTP layer onto a main model that others quantized without it."""
    _check_proof(options)
    main, mtp = _checkpoints(options)
    command = command_of("graft", replace(options, main=main, mtp=mtp))
    bundle = options.making.bundle(main, options.output_dir, command=command)
    chosen = GraftOptions(bundle, mtp, options.mtp_quant, options.replace)
    reports = options.making.try_reports()
    with gc_paused():
        plan = plan_graft(chosen, dry_run=options.making.dry_run)
    untested = _untested(options, plan)
    planned = PlannedBundle(Request("graft", chosen), options.making, plan, reports, remarks(plan))
    result = planned.run()
    if result is None:
        return
    quiet = options.making.reporting.quiet
    proof = options.proving.proof(bundle.output_dir, quiet=quiet, untested=untested)
    facts = with_pairing(result_facts(result), proof)
    planned.report(facts, Group(result_table(result), proof.words))
    proof.raise_if_failed()


def _checkpoints(options: GraftCommand) -> tuple[Place, Place]:
    """Return the main model and the checkpoint with its MTP layer (UsageError)."""
    main = given_once("The main model", options.host, "--main", options.main)
    mtp = given_once("The checkpoint with the MTP layer", options.donor, "--mtp", options.mtp)
    if main is None or mtp is None:
        raise UsageError(
            "A graft needs two checkpoints",
            expected="MAIN MTP, or --main MAIN --mtp MTP",
            found="no main model" if main is None else f"{main} alone",
            todo="See mtp-export graft --help",
        )
    return main, mtp


def _check_proof(options: GraftCommand) -> None:
    """Refuse prompts of no proof, and a proof of a bundle that is not whole (UsageError)."""
    options.proving.check()
    made = "--share" if options.making.share else "--dry-run" if options.making.dry_run else ""
    if options.proving.prove and made:
        todo = "Leave --prove out, and run mtp-export verify on the bundle when it is whole"
        if made == "--share":
            todo = "Leave --prove out, and give it to mtp-export finish"
        raise UsageError(
            "Only a whole bundle can be run",
            expected="--prove in the run that ends with the bundle",
            found=f"--prove with {made}",
            todo=todo,
        )


def _untested(options: GraftCommand, plan: BundlePlan) -> str:
    """Return the reason why the pairing is not proven of a main model whose numbers are not
    decoded, "" for another (UnsupportedError for one that is to be proven)."""
    known = undecoded_of(plan.checkpoint.config)
    if options.proving.prove:
        plan.checkpoint.check_decoded()
        if known is not None:
            raise known.refusal(f"those of {plan.checkpoint.path}")
    return "" if known is None else known.why_not_tested


def result_table(result: BundleResult) -> RenderableType:
    """Return the result of a graft for people."""
    title = heading(f"Grafted to {result.plan.options.output_dir}")
    sizes = size_lines(result.plan.sizes)
    return Group(title, parts_table(result.plan), *sizes, effort(result), *resumed(result))


def remarks(plan: BundlePlan) -> list[str]:
    """Return a remark on parts of different dtypes, which engines convert as they load them."""
    main, mtp = (
        next((part.config[key] for key in DTYPE_KEYS if key in part.config), None)
        for part in plan.parts[:2]
    )
    if main == mtp:
        return []
    return [
        f"The main model computes in {main}; its draft is stored in {mtp}, which engines round."
    ]
