"""Codes of the weights of one unit, chosen by the rows that go into them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mtp_export.calibrate.linears import Linears, Unit
from mtp_export.schemes.transforms import Convert
from mtp_kernels.quantize.gptq import Factor, gptq, output_energy
from mtp_kernels.quantize.layouts import sqnr_db
from mtp_runtime.layers.moe import gated

GPTQ, NEAREST = "gptq", "nearest"
_ROWS = 4096  # that are taken at a time


@dataclass(frozen=True)
class Inputs:
    """Rows that went into linears, summed up: hessian [K, K], fp32, is the sum of x.T @ x.

    factor is that of the Hessian, None where it has none, for the reason in words.
    """

    hessian: Tensor
    rows: int
    factor: Factor | None
    reason: str = ""

    @classmethod
    def of(cls, parts: Iterator[Tensor], columns: int) -> Inputs:
        """Sum up rows [n, K], fp32, some at a time."""
        hessian, count = torch.zeros(columns, columns), 0
        for x in parts:
            hessian.addmm_(x.t(), x)
            count += len(x)
        try:
            return cls(hessian, count, Factor.of(hessian))
        except ValueError as error:
            return cls(hessian, count, None, str(error))


def pieces(parts: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield rows of inputs on disk, some at a time, fp32."""
    return (rows.float() for part in parts for rows in torch.split(part, _ROWS))


@dataclass(frozen=True)
class Rounder:
    """Rounds the weights of units, as a plan's linears are converted."""

    linears: Linears

    def rounded(self, unit: Unit, parts: Sequence[Tensor], inputs: Inputs) -> dict[str, Any]:
        """Return the tensors and facts of each weight of a unit, by its name: what is written of
        it, but for constants; and the squares [K] of its inputs, summed over rows. parts are the
        rows that go into the unit, inputs their sum."""
        values = {name: self.linears.values(name) for name in unit.every}
        result = {
            name: self._weight(name, values, inputs)
            for name in unit.weights
            if name in self.linears.steps
        }
        down = unit.down
        if down is not None and down in self.linears.steps:
            both = torch.cat([values[name] for name in unit.weights]).t()
            made = (gated(x @ both, unit.limit) for x in pieces(parts))
            inner = Inputs.of(made, values[down].shape[1])
            result[down] = self._weight(down, values, inner)
        return result

    def _weight(self, name: str, values: Mapping[str, Tensor], inputs: Inputs) -> dict[str, Any]:
        """Choose the codes of one weight: those of GPTQ, or the nearest where they lose less."""
        weight, convert = values[name], self.linears.steps[name].operation
        assert isinstance(convert, Convert)
        format = convert.format
        if format.of_whole_matrix:
            joined = (
                values[own] if own in values else self.linears.values(own)
                for own in self.linears.joined(name)
            )
            format = format.of_amax(max(float(one.abs().max()) for one in joined))
        tensors, _ = format.quantize(weight, convert.scale_rule)
        grid = format.grid(tensors)

        def lost(numbers: Tensor) -> float:
            return output_energy(grid.values(numbers) - weight, inputs.hessian)

        nearest = grid.rounded(weight)
        energy, least, reason = output_energy(weight, inputs.hessian), lost(nearest), inputs.reason
        facts: dict[str, Any] = {"nearest_outputs_sqnr_db": _decibels(energy, least)}
        rounding = NEAREST
        if inputs.factor is not None:
            numbers = gptq(weight, inputs.factor, grid)
            found = lost(numbers)
            if found < least:
                tensors, least, rounding = (grid.stored(numbers), *tensors[1:]), found, GPTQ
            else:
                reason = "GPTQ loses more of its outputs"
        facts |= {"outputs_sqnr_db": _decibels(energy, least), "rounding": rounding}
        if rounding == NEAREST:
            facts["reason"] = reason
        squares = inputs.hessian.diagonal().contiguous()
        return {"tensors": list(tensors), "facts": facts, "squares": squares, "rows": inputs.rows}


def _decibels(signal: float, noise: float) -> float | None:
    """Return an SQNR, None where nothing was lost."""
    level = sqnr_db(signal, noise)
    return round(level, 2) if math.isfinite(level) else None
