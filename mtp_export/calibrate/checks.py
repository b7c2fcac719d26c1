"""Refusals of a calibration before anything is written."""

from __future__ import annotations

from pathlib import Path

from mtp_checkpoints.errors import UnsupportedError, UsageError
from mtp_export.bundle.bundle_plan import BundlePlan
from mtp_export.bundle.options import Part
from mtp_export.calibrate.options import CalibrationOptions


def check_calibration(
    plan: BundlePlan, calibration: CalibrationOptions, cluster: str | None = None
) -> None:
    """Refuse a bundle whose main model does not run here while it is made, and shares of what is
    not divided (UsageError, UnsupportedError)."""
    options = plan.options
    if cluster is not None:
        raise UsageError(
            "The tasks of a cluster share no work folder, in which a calibration keeps its texts",
            expected="--calibrate without --cluster",
            found="both",
            todo="Divide the bundle with --share, or make it on one machine",
        )
    if options.run.share is not None and calibration.main:
        raise UsageError(
            "The calibration of a main model is not divided: each layer takes what all layers"
            " before it, as they are written, make of the texts",
            expected="--calibrate-main without --share",
            found="both",
            todo="Make the whole bundle on one machine",
        )
    of_all = {
        "--imatrix": calibration.imatrix is not None,
        "--measure-inputs": calibration.measure_inputs,
    }
    for name in (name for name, is_given in of_all.items() if is_given and options.run.share):
        raise UsageError(
            f"{name} takes the inputs of all weights, and a share has those of its own",
            expected=f"{name} without --share",
            found="both",
            todo=f"Leave {name} out, or make the whole bundle on one machine",
        )
    if options.content.part is not Part.BOTH:
        raise UsageError(
            "A calibration runs the main model of the bundle that it is part of",
            expected="--part both",
            found=f"--part {options.content.part}",
        )
    if not isinstance(options.input_dir, Path):
        raise UsageError(
            "A calibration reads the MTP layer many times",
            expected="a local --input-dir",
            found=options.input_dir,
            todo="Download the checkpoint first",
        )
    if plan.device != "cpu":
        raise UnsupportedError(
            "A calibration computes on the CPU",
            expected="--device cpu",
            found=f"--device {plan.device}",
        )
