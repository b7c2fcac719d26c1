"""Codes of the weights of one unit, chosen by the rows that go into them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mtp_checkpoints.weights.folding import MOST, UNFOLDED, Folding, as_letters
from mtp_export.calibrate.linears import Linears, Unit
from mtp_export.calibrate.options import Method
from mtp_export.schemes.calibrated import FOLDED
from mtp_kernels.quantize.awq import best_exponents, relative_magnitude
from mtp_kernels.quantize.gptq import Factor, Grid, gptq, output_energy
from mtp_kernels.quantize.layouts import sqnr_db
from mtp_runtime.layers.moe import gated

NEAREST = "nearest"
_ROWS = 4096  # that are taken at a time
_BOUNDED = "its inputs are bounded, and take no scales"
_NO_SCALES = "no scales lose less of the outputs"
_NO_FOLD = "its inputs come from what takes no scales"


@dataclass(frozen=True)
class Inputs:
    """Rows that went into linears, summed up: hessian [K, K] is the sum of x.T @ x, magnitude [K]
    the mean of abs(x), largest [K] its maximum; all fp32."""

    hessian: Tensor
    magnitude: Tensor
    largest: Tensor
    rows: int

    @classmethod
    def of(cls, parts: Iterator[Tensor], columns: int) -> Inputs:
        """Sum up rows [n, K], fp32, some at a time."""
        sums = Sums(columns)
        for x in parts:
            sums.add(x)
        return sums.inputs

    @cached_property
    def factor(self) -> Factor | str:
        """The factor of the Hessian, or why it has none."""
        try:
            return Factor.of(self.hessian)
        except ValueError as error:
            return str(error)


class Sums:
    """Sums of rows [n, K], fp32, which come one after the other."""

    def __init__(self, columns: int) -> None:
        self._hessian = torch.zeros(columns, columns)
        self._magnitude, self._largest = torch.zeros(2, columns)
        self._rows = 0

    def add(self, x: Tensor) -> None:
        """Add rows [n, K]."""
        self._hessian.addmm_(x.t(), x)
        magnitude = x.abs()
        self._magnitude += magnitude.sum(dim=0)
        self._largest = torch.maximum(self._largest, magnitude.amax(dim=0))
        self._rows += len(x)

    @property
    def inputs(self) -> Inputs:
        """Sums of all rows until now."""
        mean = self._magnitude / max(1, self._rows)
        return Inputs(self._hessian, mean, self._largest, self._rows)


def pieces(parts: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield rows of inputs on disk, some at a time, fp32."""
    return (rows.float() for part in parts for rows in torch.split(part, _ROWS))


@dataclass(frozen=True)
class _Values:
    """Weights of a unit by name, fp32 as the source has them, and the scales that are folded into
    them; why those without any have none."""

    linears: Linears
    values: Mapping[str, Tensor]
    foldings: Mapping[str, Folding]
    reason: str = ""

    def __getitem__(self, name: str) -> Tensor:
        return self.values[name]

    def folding(self, name: str) -> Folding:
        return self.foldings.get(name, UNFOLDED)

    def unfolded(self) -> _Values:
        return _Values(self.linears, self.values, {})

    def grid(self, name: str) -> tuple[list[Tensor], Grid]:
        """Return the tensors of a weight rounded to the nearest, and the grid that they are on."""
        convert = self.linears.convert(name)
        format = convert.format
        if format.of_whole_matrix:
            joined = (self._folded(own) for own in self.linears.joined(name))
            format = format.of_amax(max(float(one.abs().max()) for one in joined))
        tensors, _ = format.quantize(self._folded(name), convert.scale_rule)
        return list(tensors), format.grid(tensors)

    def nearest(self, name: str, grid: Grid) -> Tensor:
        """Return the numbers of a grid that are nearest to a weight."""
        return grid.rounded(self._folded(name))

    def lost(self, name: str, grid: Grid, numbers: Tensor, inputs: Inputs) -> float:
        """Return the squared error of a weight's outputs for inputs without scales."""
        kept = self.folding(name).undone(grid.values(numbers))
        return output_energy(kept - self.values[name], inputs.hessian)

    def _folded(self, name: str) -> Tensor:
        own = self.values[name] if name in self.values else self.linears.values(name)
        return self.folding(name).of(own)


@dataclass(frozen=True)
class Rounder:
    """Rounds the weights of units, as a plan's linears are converted, by a method."""

    linears: Linears
    method: Method = Method.GPTQ

    def rounded(
        self, unit: Unit, parts: Iterable[Tensor], inputs: Inputs, columns: Tensor | None = None
    ) -> dict[str, Any]:
        """Return the tensors and facts of each weight of a unit, by its name: what is written of
        it, but for constants; the scales in it; the squares [K] of its inputs, summed over rows;
        and the largest of them under the scales. parts are the rows that go into the unit, inputs
        their sum, columns the exponents of the scales of these."""
        values = {name: self.linears.values(name) for name in unit.every}
        down, inner = unit.down, None
        if down is not None and down in self.linears.steps:
            both = torch.cat([values[name] for name in unit.weights]).t()
            made = (gated(x @ both, unit.limit) for x in pieces(parts))
            inner = Inputs.of(made, values[down].shape[1])
        own = self._with_foldings(unit, values, (inputs, inner), columns)
        result = {
            name: self._weight(name, own, inputs)
            for name in unit.weights
            if name in self.linears.steps
        }
        if down is not None and inner is not None:
            result[down] = self._weight(down, own, inner)
        return result

    def exponents(self, units: Sequence[Unit], inputs: Inputs) -> Tensor:
        """Return the exponents of scales, int8 [K], by which least is lost of what units make of
        one input."""
        names = [name for unit in units for name in unit.weights if name in self.linears.steps]
        values = {name: self.linears.values(name) for name in names}

        def folded(exponents: Tensor) -> dict[str, Folding]:
            return dict.fromkeys(names, Folding(columns=exponents))

        return self._exponents(values, dict.fromkeys(names, inputs), folded, names)

    def _exponents(
        self,
        values: Mapping[str, Tensor],
        inputs: Mapping[str, Inputs],
        folded: Callable[[Tensor], Mapping[str, Folding]],
        scaled: Sequence[str],
    ) -> Tensor:
        """Return the exponents by which weights lose least, all together, each beside what it makes
        of its inputs; scaled are those whose columns are multiplied."""
        energy = {name: output_energy(values[name], inputs[name].hessian) for name in values}

        def lost(exponents: Tensor) -> float:
            own, total = _Values(self.linears, values, folded(exponents)), 0.0
            for name in values:
                _, grid = own.grid(name)
                loss = own.lost(name, grid, own.nearest(name, grid), inputs[name])
                total += loss / max(energy[name], torch.finfo(torch.float32).tiny)
            return total

        group_size = _Values(self.linears, values, {}).grid(scaled[0])[1].group_size
        relative = relative_magnitude([values[name] for name in scaled], group_size)
        return best_exponents(inputs[scaled[0]].magnitude, relative, MOST, lost)

    def _inner_exponents(
        self, own: Mapping[str, Tensor], columns: Tensor, both: Mapping[str, Inputs]
    ) -> Tensor:
        """Return the exponents of an expert's inner values: what its down and, where the scale of a
        row changes its codes, its up lose; both have their inputs, up first."""
        up, down = both
        kept = [up, down] if self.linears.convert(up).format.of_whole_matrix else [down]

        def folded(rows: Tensor) -> dict[str, Folding]:
            return {up: Folding(rows, columns), down: Folding(columns=rows)}

        return self._exponents({name: own[name] for name in kept}, both, folded, [down])

    def _with_foldings(
        self,
        unit: Unit,
        values: Mapping[str, Tensor],
        summed: tuple[Inputs, Inputs | None],
        columns: Tensor | None,
    ) -> _Values:
        inputs, inner = summed
        if columns is None:
            return _Values(self.linears, values, {}, _NO_FOLD)
        foldings = {name: Folding(columns=columns) for name in unit.weights}
        reason, down, up = _NO_SCALES, unit.down, unit.weights[-1]
        if unit.limit:
            reason = _BOUNDED
        elif down is not None and inner is not None and up in self.linears.steps:
            rows = self._inner_exponents(values, columns, {up: inputs, down: inner})
            foldings |= {up: Folding(rows, columns), down: Folding(columns=rows)}
        return _Values(self.linears, values, foldings, reason)

    def _weight(self, name: str, values: _Values, inputs: Inputs) -> dict[str, Any]:
        """Choose the codes of one weight: the nearest to it with its scales, or those of GPTQ where
        they lose less than the nearest."""
        plain = values.unfolded()
        tensors, grid = plain.grid(name)
        nearest = plain.nearest(name, grid)
        least = plain.lost(name, grid, nearest, inputs)
        energy, rounding, reason = output_energy(values[name], inputs.hessian), NEAREST, ""
        facts: dict[str, Any] = {"nearest_outputs_sqnr_db": _decibels(energy, least)}
        folding = values.folding(name)
        if self.method is Method.AWQ:
            tensors, grid = values.grid(name)
            least = values.lost(name, grid, values.nearest(name, grid), inputs)
            rounding, reason = (str(Method.AWQ) if folding.changes else NEAREST), values.reason
        elif isinstance(inputs.factor, str):
            reason = inputs.factor
        else:
            numbers = gptq(values[name], inputs.factor, grid)
            found = plain.lost(name, grid, numbers, inputs)
            if found < least:
                tensors = [grid.stored(numbers), *tensors[1:]]
                least, rounding = found, str(Method.GPTQ)
            else:
                reason = "GPTQ loses more of its outputs"
        facts |= {"outputs_sqnr_db": _decibels(energy, least), "rounding": rounding}
        if rounding == NEAREST:
            facts["reason"] = reason
        if folding.rows is not None:
            facts[FOLDED] = as_letters(folding.rows)
        squares = inputs.hessian.diagonal().contiguous()
        kept = {"tensors": tensors, "facts": facts, "squares": squares, "rows": inputs.rows}
        largest = float(Folding(columns=folding.columns).undone(inputs.largest).max())
        return kept | {"largest": largest, "folding": [folding.rows, folding.columns]}


def _decibels(signal: float, noise: float) -> float | None:
    """Return an SQNR, None where nothing was lost."""
    level = sqnr_db(signal, noise)
    return round(level, 2) if math.isfinite(level) else None
