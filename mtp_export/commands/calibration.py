"""Calibration as part of quantize: planned, foretold by a dry run, and told of in the result."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from mtp_export.bundle.build import BundleResult, Maker
from mtp_export.bundle.bundle_plan import BundlePlan
from mtp_export.bundle.quantize import QuantizeOptions
from mtp_export.bundle.request import Request
from mtp_export.calibrate.checks import check_calibration
from mtp_export.calibrate.options import CalibrationOptions
from mtp_export.commands.bundle_command import Making
from mtp_export.commands.progress_bar import count_bar
from mtp_export.progress import counted

if TYPE_CHECKING:
    from mtp_export.calibrate.run import Calibration

_LEVELS = ("outputs_sqnr_db", "nearest_outputs_sqnr_db")


@dataclass(frozen=True)
class Calibrating:
    """A plan that may be calibrated, and what does it; None: nothing is."""

    plan: BundlePlan
    calibration: Calibration | None = None

    @classmethod
    def of(cls, plan: BundlePlan, options: CalibrationOptions, making: Making) -> Calibrating:
        """Plan the calibration that options ask for, if they do (MtpExportError)."""
        if options.calibrate is None:
            return cls(plan)
        check_calibration(plan, options, making.cluster)
        from mtp_export.calibrate.run import Calibration

        show = partial(count_bar, quiet=making.reporting.quiet)
        calibration = Calibration.of(plan, options, show)
        return cls(calibration.plan, calibration)

    @property
    def maker(self) -> Maker | None:
        """Maker of the shards; None: the usual one."""
        return None if self.calibration is None else self.calibration.make

    def remarks(self, *, dry_run: bool) -> Iterator[str]:
        """Yield what a dry run says of it."""
        if dry_run and self.calibration is not None:
            from mtp_export.calibrate.estimate import Estimate

            own = self.calibration
            if own.main is not None:
                yield Estimate.of_main(own.main).in_words
            if own.linears.steps:
                yield Estimate.of_mtp(own).in_words


def request_of(chosen: QuantizeOptions, calibration: CalibrationOptions) -> Request:
    """Return the request of a quantization that may be calibrated."""
    if calibration.calibrate is None:
        return Request("quantize", chosen)
    from mtp_export.calibrate.request import CalibratedOptions

    options = CalibratedOptions(**vars(chosen), calibration=calibration)
    return Request("quantize --calibrate", options)


def calibration_facts(result: BundleResult) -> dict[str, Any]:
    """Return how many weights were calibrated, the SQNR of their outputs beside that of rounding to
    the nearest, medians in dB, and those that were rounded so after all, with the reason."""
    chosen = {name: facts for name, facts in result.facts.items() if "rounding" in facts}
    if not chosen:
        return {}
    levels = {
        level: [facts[level] for facts in chosen.values() if facts[level] is not None]
        for level in _LEVELS
    }
    nearest = {name: facts["reason"] for name, facts in chosen.items() if "reason" in facts}
    return {
        "calibration": {
            "weights": len(chosen),
            **{name: round(median(known), 2) if known else None for name, known in levels.items()},
            "nearest": nearest,
        }
    }


def calibration_lines(facts: dict[str, Any]) -> list[str]:
    """Return the calibration of a result for people."""
    if "calibration" not in facts:
        return []
    own = facts["calibration"]
    found, before = (_decibels(own[level]) for level in _LEVELS)
    lines = [
        f"Calibrated: {counted(own['weights'], 'weight')}, SQNR of outputs {found} (median;"
        f" {before} rounded to the nearest)."
    ]
    if own["nearest"]:
        name, reason = next(iter(own["nearest"].items()))
        others = ", and others" if len(own["nearest"]) > 1 else ""
        lines.append(
            f"{counted(len(own['nearest']), 'weight')} rounded to the nearest after all: {name}"
            f" ({reason}){others}."
        )
    return lines


def work_folder(options: CalibrationOptions, output: Path) -> dict[str, Path]:
    """Return the folder that a calibration keeps beside a bundle, by what it is called."""
    return {} if options.calibrate is None else {"the work folder": options.work(output)}


def _decibels(level: float | None) -> str:
    return "exact" if level is None else f"{level:.1f} dB"
