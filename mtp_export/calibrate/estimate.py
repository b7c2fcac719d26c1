"""Operations, time, memory and disk that a calibration takes, from shapes and lengths of texts."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from mtp_export.calibrate.linears import Linears
from mtp_export.calibrate.options import Method
from mtp_export.calibrate.run import SEARCHED, TEXT_TOKENS, Calibration
from mtp_export.progress import format_bytes
from mtp_export.tune.estimate import operations_per_second
from mtp_export.tune.row_store import row_bytes
from mtp_kernels.quantize.awq import RATIOS
from mtp_runtime.layer_inputs import DEPTHS, ROW_DTYPE

_FLOAT32 = 4
_MATRICES = 5  # of a Hessian's size at once, while it is factored
_COPIES = 6  # of a unit's weights, while they are rounded
_SEARCH = 2 * (RATIOS + 1)  # by the same: what a weight loses under each of the scales
_FACTOR = 2  # operations by the cube of the columns: two Cholesky factors, and an inverse
_ROUNDING = 8  # by the elements of a weight and its columns: GPTQ, and what three roundings lose


@dataclass(frozen=True)
class Estimate:
    """Operations and sizes of a calibration, beside the main model's own run on the texts.

    rows: what goes into the MTP layer, at all depths together. operations: of sums, factors and
    rounding; seconds: theirs, at the rate of a large product here. memory_bytes: at the peak of
    rounding. disk_bytes: of the work folder.
    """

    rows: int
    weights: int
    operations: float
    seconds: float
    memory_bytes: int
    disk_bytes: int

    @classmethod
    def of(cls, calibration: Calibration) -> Estimate:
        """Return what a calibration will take; measures a product for a fraction of a second."""
        linears = calibration.linears
        tokens = sum(
            min(TEXT_TOKENS, len(line.prompt) + len(line.answer or range(calibration.new_tokens)))
            for line in calibration.lines
        )
        rows, shapes = DEPTHS * tokens, linears.shapes
        inputs, inner = _columns(linears)
        widths = [*inputs.values(), *inner.values()]
        operations = float(sum(2 * rows * k**2 + _FACTOR * k**3 for k in widths))
        operations += sum(_ROUNDING * n * k**2 for n, k in shapes.values())
        into_inner = (
            prod(shapes[n]) for unit in linears.of_experts if unit.down for n in unit.weights
        )
        operations += 2 * rows * sum(into_inner)
        searched = 0
        if calibration.options.method is Method.AWQ:
            downs = [shapes[unit.down] for unit in linears.of_experts if unit.down]
            some = [shapes[n] for unit in linears.of_experts[:SEARCHED] for n in unit.weights]
            operations += sum(_SEARCH * n * k**2 for n, k in (*downs, *some))
            searched = sum(map(prod, some))
        codes = sum(step.size_bytes for step in linears.steps.values())
        of_inputs = rows * sum(inputs.values()) * ROW_DTYPE.itemsize
        largest = max(map(prod, shapes.values()))
        return cls(
            rows=rows,
            weights=len(linears.steps),
            operations=operations,
            seconds=operations / operations_per_second("cpu", torch.float32),
            memory_bytes=_FLOAT32 * (_MATRICES * max(widths) ** 2 + _COPIES * largest + searched),
            disk_bytes=tokens * row_bytes(linears.plan.family.facts.hidden) + of_inputs + codes,
        )

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "seconds": round(self.seconds, 1)}

    @property
    def in_words(self) -> str:
        """A sentence for people."""
        return (
            f"Calibration of {self.weights:,} weights by {self.rows:,} rows:"
            f" {self.operations / 1e12:.1f} TFLOP, about {self.seconds / 60:.0f} min here beside"
            f" the main model's run; {format_bytes(self.disk_bytes)} in the work folder,"
            f" {format_bytes(self.memory_bytes)} of memory beside the rows of a part."
        )


def _columns(linears: Linears) -> tuple[dict[str, int], dict[str, int]]:
    """Return the columns of what goes into linears, and of what experts make of it, by name."""
    shapes = linears.shapes
    units = linears.of_experts
    of_experts = {name for unit in units for name in unit.every}
    inputs = {unit.input: shapes[unit.weights[0]][1] for unit in units}
    inputs |= {name: shape[1] for name, shape in shapes.items() if name not in of_experts}
    return inputs, {unit.down: shapes[unit.down][1] for unit in units if unit.down in linears.steps}
