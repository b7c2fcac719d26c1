"""Grids of weights that engines join, and AWQ's search of scales; GPTQ is the product's.

AWQ chooses among the numbers of a grid by the inputs of the linear instead of by the weight alone.
Source: Lin et al., AWQ, 2023.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mtp_checkpoints.formats import Int4Group, NvFp4Packed, WeightFormat
from mtp_kernels.quantize.gptq import Grid, output_energy

RATIOS = 20  # of AWQ's exponents, from 0
_LEAST = 1e-4  # of AWQ's scales


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
    """Return weights [N, K] that were rounded after their columns were scaled, scaled back: of
    RATIOS exponents, and no scale, those with the least error of the outputs.

    All share one input, whose scales are to be folded into what comes before; engines join those of
    each list. The error is that of the linears, and not of the module that they are part of.
    """
    width = torch.cat([weight for weights in joined for weight in weights]).abs()
    relative = (width / width.amax(dim=1, keepdim=True).clamp(min=_LEAST)).mean(dim=0)
    best, least = list[list[Tensor]](), float("inf")
    for ratio in (None, *(number / RATIOS for number in range(RATIOS))):
        scales = _scales(inputs.magnitude, relative, ratio)
        found, loss = list[list[Tensor]](), 0.0
        for weights in joined:
            scaled = [weight * scales for weight in weights]
            kept = [
                nearest(grid, own) / scales for grid, own in zip(grids(scaled), scaled, strict=True)
            ]
            loss += sum(
                inputs.loss(own - weight) for own, weight in zip(kept, weights, strict=True)
            )
            found.append(kept)
        if loss < least:
            best, least = found, loss
    return best


def _scales(magnitude: Tensor, relative: Tensor, ratio: float | None) -> Tensor:
    if ratio is None:
        return torch.ones_like(magnitude)
    scales = magnitude**ratio / (relative ** (1 - ratio) + _LEAST)
    scales = scales.clamp(min=_LEAST)
    return scales / (scales.max() * scales.min()).sqrt()
