"""Refusals of a calibration before anything is written."""

from __future__ import annotations

from pathlib import Path

from mtp_checkpoints.errors import UnsupportedError, UsageError
from mtp_export.bundle.bundle_plan import BundlePlan
from mtp_export.bundle.options import Part


def check_calibration(plan: BundlePlan, cluster: str | None = None) -> None:
    """Refuse a bundle whose main model does not run here while it is made (UsageError,
    UnsupportedError)."""
    options = plan.options
    if options.run.share is not None or cluster is not None:
        raise UsageError(
            "A calibration is not divided: its texts and its Hessians are those of one process,"
            " which has the main model",
            expected="--calibrate without --share and --cluster",
            found="both",
            todo="Make the whole bundle on one machine",
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
