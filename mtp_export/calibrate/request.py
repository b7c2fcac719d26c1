"""Request of a calibrated bundle, from which the end of its shares makes the same plan."""

from __future__ import annotations

from dataclasses import dataclass

from mtp_checkpoints.errors import UsageError
from mtp_checkpoints.sources.byte_source import Place
from mtp_export.bundle.bundle_plan import BundlePlan
from mtp_export.bundle.quantize import QuantizeOptions, plan_quantize
from mtp_export.calibrate.options import CalibrationOptions
from mtp_export.calibrate.run import Calibration


@dataclass(frozen=True)
class CalibratedOptions(QuantizeOptions):
    """A bundle, the precision of each of its parts, and the calibration that chooses codes."""

    calibration: CalibrationOptions = CalibrationOptions()

    @property
    def inputs(self) -> tuple[Place, ...]:
        """Checkpoints that are read, and the texts."""
        texts = self.calibration.calibrate
        return super().inputs if texts is None else (*super().inputs, texts)


def plan_calibrated(options: CalibratedOptions, *, dry_run: bool = False) -> BundlePlan:
    """Plan a quantization, and its calibration (MtpExportError; UsageError without texts)."""
    if options.calibration.calibrate is None:
        raise UsageError("The shares of a calibration name no texts", expected="--calibrate FILE")
    return Calibration.of(plan_quantize(options, dry_run=dry_run), options.calibration).plan
