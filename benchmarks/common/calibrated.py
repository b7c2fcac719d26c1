"""Grids of weights that engines join, and weights rounded under the scales of AWQ; the search of
scales is the product's, as GPTQ is."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from mtp_checkpoints.formats import Int4Group, NvFp4Packed, WeightFormat
from mtp_checkpoints.weights.folding import MOST, Folding
from mtp_kernels.quantize.awq import best_exponents, relative_magnitude
from mtp_kernels.quantize.gptq import Factor, Grid, gptq, output_energy


@dataclass(frozen=True)
class Inputs:
    """Statistics of the rows x [n, K] that went into linears: hessian [K, K], the sum of x.T @ x,
    and magnitude [K], the mean of abs(x); both float32."""

    hessian: Tensor
    magnitude: Tensor

    @classmethod
    def of(cls, rows: Tensor) -> Inputs:
        """Sum up rows [n, K]."""
        x = rows.float()
        return cls(x.t() @ x, x.abs().mean(dim=0))

    def loss(self, change: Tensor) -> float:
        """Return the squared error of all outputs under a change [N, K] of the weight."""
        return output_energy(change, self.hessian)


# Makes the grids of weights that engines join, of their values.
Grids = Callable[[Sequence[Tensor]], list[Grid]]


def grids_of(format: WeightFormat, scale_rule: str) -> Grids:
    """Return the grids of a format, whose scales the rule chooses; a number for the whole matrix is
    that of all weights that are joined."""

    def of(weights: Sequence[Tensor]) -> list[Grid]:
        own = format
        if format.of_whole_matrix:
            own = format.of_amax(max(float(weight.abs().max()) for weight in weights))
        return [own.grid(own.quantize(weight, scale_rule)[0]) for weight in weights]

    return of


def int4_grids(group_size: int, scale_rule: str) -> Grids:
    """Return the grids of int4 groups."""
    return grids_of(Int4Group(group_size), scale_rule)


def nvfp4_grids(scale_rule: str) -> Grids:
    """Return the grids of nvfp4."""
    return grids_of(NvFp4Packed(), scale_rule)


def nearest(grid: Grid, weight: Tensor) -> Tensor:
    """Return the nearest weight [N, K] on a grid."""
    return grid.values(grid.rounded(weight))


def awq(joined: Sequence[Sequence[Tensor]], inputs: Inputs, grids: Grids) -> list[list[Tensor]]:
    """Return weights [N, K] that were rounded after their columns were scaled, scaled back, by the
    scales that the product chooses: those with the least error of the outputs.

    All share one input, whose scales are to be folded into what comes before; engines join those of
    each list. The error is that of the linears, and not of the module that they are part of.
    """
    every = [weight for weights in joined for weight in weights]
    group_size = grids(joined[0])[0].group_size

    def rounded(exponents: Tensor) -> list[list[Tensor]]:
        folding, found = Folding(columns=exponents), []
        for weights in joined:
            scaled = [folding.of(weight) for weight in weights]
            pairs = zip(grids(scaled), scaled, strict=True)
            found.append([folding.undone(nearest(grid, own)) for grid, own in pairs])
        return found

    def lost(exponents: Tensor) -> float:
        kept = [own for weights in rounded(exponents) for own in weights]
        return sum(inputs.loss(own - weight) for own, weight in zip(kept, every, strict=True))

    relative = relative_magnitude(every, group_size)
    return rounded(best_exponents(inputs.magnitude, relative, MOST, lost))


@dataclass(frozen=True)
class Joined:
    """Weights that are multiplied as one matrix, by name, and what goes into them; scaled: scales
    of its columns fold into what comes before."""

    names: tuple[str, ...]
    inputs: Inputs
    scaled: bool


@dataclass(frozen=True)
class Rounding:
    """Ways to round every weight of a layer."""

    weights: Mapping[str, Tensor]
    joined: Sequence[Joined]

    def rounded(self, grids: Grids, method: str) -> dict[str, Tensor]:
        """Return the weights on their grids by a method: rtn, gptq or awq."""
        result, of_input = dict[str, Tensor](), dict[int, list[Joined]]()
        for own in self.joined:
            values = [self.weights[name] for name in own.names]
            if method == "awq" and own.scaled:
                of_input.setdefault(id(own.inputs), []).append(own)
                continue
            for name, w, grid in zip(own.names, values, grids(values), strict=True):
                if method == "gptq":
                    numbers = gptq(w, Factor.of(own.inputs.hessian), grid)
                    result[name] = grid.values(numbers)
                else:
                    result[name] = nearest(grid, w)
        for alike in of_input.values():
            sets = [[self.weights[name] for name in own.names] for own in alike]
            for own, kept in zip(alike, awq(sets, alike[0].inputs, grids), strict=True):
                result |= zip(own.names, kept, strict=True)
        return result

    def facts(self, rounded: Mapping[str, Tensor], measured: Sequence[Joined]) -> dict[str, float]:
        """Return the SQNR of the weights, and of the linears' outputs for the inputs that were
        measured, in dB, all together."""
        signal = noise = outputs = lost = 0.0
        for own in measured:
            for name in own.names:
                weight, change = self.weights[name], rounded[name] - self.weights[name]
                signal += float(weight.double().square().sum())
                noise += float(change.double().square().sum())
                outputs += own.inputs.loss(weight)
                lost += own.inputs.loss(change)
        return {
            "weights_sqnr_db": 10 * math.log10(signal / noise),
            "outputs_sqnr_db": 10 * math.log10(outputs / lost),
        }
