"""Weights rounded by what goes through them: GPTQ in static order, and AWQ's search of scales.

A grid holds the numbers that a format can store of one weight, its scales fixed beforehand; both
methods choose among them by the inputs of the linear instead of by the weight alone.
Sources: Frantar et al., GPTQ, 2022; Lin et al., AWQ, 2023.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mtp_kernels.quantize import quantize_int4_group
from mtp_kernels.quantize.block_floats import (
    e2m1_codes,
    e2m1_values,
    nvfp4_divisor,
    quantize_nvfp4,
)

DAMPING = 0.01  # of the mean of the Hessian's diagonal
COLUMNS = 128  # that are rounded before the later ones are corrected
RATIOS = 20  # of AWQ's exponents, from 0
_LEAST = 1e-4  # of AWQ's scales


@dataclass(frozen=True)
class Inputs:
    """Statistics of the rows x [n, K] that went into linears: hessian [K, K], the sum of x.T @ x,
    and magnitude [K], the mean of abs(x); both float32."""

    hessian: Tensor
    magnitude: Tensor

    def loss(self, change: Tensor) -> float:
        """Return the squared error of all outputs under a change [N, K] of the weight."""
        return float(((change @ self.hessian) * change).sum())


@dataclass(frozen=True)
class Grid:
    """Numbers that a weight [N, K] can be stored as: multiplier [N, K] times what `nearest` returns
    of values over it."""

    multiplier: Tensor
    nearest: Callable[[Tensor], Tensor]

    def rounded(self, values: Tensor, columns: slice | int = slice(None)) -> Tensor:
        """Return the nearest numbers of the grid to values of these columns."""
        multiplier = self.multiplier[:, columns]
        return self.nearest(values / multiplier) * multiplier

    def ordered(self, order: Tensor) -> Grid:
        """Return the grid with its columns in another order [K]."""
        return Grid(self.multiplier[:, order], self.nearest)


# Makes the grids of weights that engines join, of their values.
Grids = Callable[[Sequence[Tensor]], list[Grid]]


def int4_grids(group_size: int, scale_rule: str) -> Grids:
    """Return the grids of int4 groups, which quantize_int4_group scales by the rule."""

    def of(weight: Tensor) -> Grid:
        stored, _ = quantize_int4_group(weight, group_size=group_size, scale_rule=scale_rule)
        scale = stored.scale.float().repeat_interleave(group_size, dim=1)
        return Grid(scale, lambda values: values.round().clamp(-8, 7))

    return lambda weights: [of(weight) for weight in weights]


def nvfp4_grids(*, sweep: bool) -> Grids:
    """Return the grids of nvfp4, under one number for all weights that are joined."""

    def of(weights: Sequence[Tensor]) -> list[Grid]:
        divisor = nvfp4_divisor(max(float(weight.abs().max()) for weight in weights))
        scales = [quantize_nvfp4(weight, divisor, sweep=sweep)[1].float() for weight in weights]
        return [Grid((scale / divisor).repeat_interleave(16, dim=1), _e2m1) for scale in scales]

    return of


def _e2m1(values: Tensor) -> Tensor:
    return e2m1_values(e2m1_codes(values))


def gptq(weight: Tensor, hessian: Tensor, grid: Grid) -> Tensor:
    """Return a weight [N, K] on its grid, fp32, with the error of each column made good in those
    after it; columns go by the descending diagonal of the Hessian [K, K].

    A column whose input is always 0 becomes 0. Raises torch.linalg.LinAlgError where the damped
    Hessian has no Cholesky factor.
    """
    dead = hessian.diagonal() == 0
    order = hessian.diagonal().argsort(descending=True, stable=True)
    hessian = hessian + torch.diag(dead.float())
    hessian = hessian + torch.eye(len(hessian)) * (DAMPING * hessian.diagonal().mean())
    lower = torch.linalg.cholesky(hessian[order][:, order])
    upper = torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True)
    left = weight.masked_fill(dead, 0.0)[:, order]
    grid, kept = grid.ordered(order), torch.empty_like(left)
    for start in range(0, left.shape[1], COLUMNS):
        block = slice(start, min(start + COLUMNS, left.shape[1]))
        errors = torch.empty_like(left[:, block])
        for column in range(block.start, block.stop):
            kept[:, column] = grid.rounded(left[:, column], column)
            error = (left[:, column] - kept[:, column]) / upper[column, column]
            left[:, column : block.stop] -= error[:, None] * upper[column, column : block.stop]
            errors[:, column - start] = error
        left[:, block.stop :] -= errors @ upper[block, block.stop :]
    return kept[:, order.argsort()]


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
                grid.rounded(own) / scales for grid, own in zip(grids(scaled), scaled, strict=True)
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
