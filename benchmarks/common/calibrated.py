"""Grids of weights that engines join, and weights rounded under the scales of AWQ; the search of
scales is the product's, as GPTQ is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from mtp_checkpoints.formats import Int4Group, NvFp4Packed, WeightFormat
from mtp_checkpoints.weights.folding import MOST, Folding
from mtp_kernels.quantize.awq import best_exponents, relative_magnitude
from mtp_kernels.quantize.gptq import Grid, output_energy


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
