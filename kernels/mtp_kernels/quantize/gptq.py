"""Rounding of weights by what goes through them: GPTQ in static order, in torch.

A grid holds the numbers that a format can store of a weight, its scales fixed beforehand. Rounding
to the nearest of them looks at the weight alone; GPTQ makes the error of each column good in those
after it, by the inputs of the linear.
Source: Frantar et al., GPTQ, 2022.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from mtp_kernels.quantize.block_floats import NVFP4_GROUP, e2m1_codes, e2m1_values, pack_pairs
from mtp_kernels.quantize.layouts import INT4_MAX, INT4_MIN

DAMPING = 0.01  # of the mean of the Hessian's diagonal, added to it
COLUMNS = 128  # that are rounded before the later ones are corrected


@dataclass(frozen=True)
class Grid:
    """Numbers that a weight [N, K] can be stored as.

    multiplier [N, K/g], fp32, is that of each group of g = group_size columns. nearest returns the
    numbers nearest to values over it, stored the codes on disk of numbers [N, K].
    """

    multiplier: Tensor
    group_size: int
    nearest: Callable[[Tensor], Tensor]
    stored: Callable[[Tensor], Tensor]

    @classmethod
    def int4(cls, multiplier: Tensor, group_size: int) -> Self:
        """Return the integers from -8 to 7, eight in a word I32 as code + 8."""

        def stored(numbers: Tensor) -> Tensor:
            return pack_pairs((numbers - INT4_MIN).to(torch.uint8)).contiguous().view(torch.int32)

        def nearest(values: Tensor) -> Tensor:
            return values.round().clamp(INT4_MIN, INT4_MAX)

        return cls(multiplier, group_size, nearest, stored)

    @classmethod
    def nvfp4(cls, multiplier: Tensor) -> Self:
        """Return the numbers e2m1, two in a byte."""
        return cls(
            multiplier,
            NVFP4_GROUP,
            nearest=lambda values: e2m1_values(e2m1_codes(values)),
            stored=lambda numbers: pack_pairs(e2m1_codes(numbers)),
        )

    def rounded(self, weight: Tensor) -> Tensor:
        """Return the numbers [N, K] nearest to a weight."""
        return self.nearest(weight / self._columns)

    def values(self, numbers: Tensor) -> Tensor:
        """Return the weight [N, K], fp32, that numbers stand for."""
        return numbers * self._columns

    @property
    def _columns(self) -> Tensor:
        return self.multiplier.repeat_interleave(self.group_size, dim=1)


@dataclass(frozen=True)
class Factor:
    """The Hessian of a linear's inputs as GPTQ takes it: columns in the order of the descending
    diagonal.

    order [K]: the column of each place. dead [K]: places of columns whose input is always 0. upper
    [K, K], fp32: the Cholesky factor of the inverse.
    """

    order: Tensor
    dead: Tensor
    upper: Tensor

    @classmethod
    def of(cls, hessian: Tensor, damping: float = DAMPING) -> Self:
        """Factor the sum of x.T @ x [K, K], fp32, of the inputs, which is damped by a part of its
        mean diagonal.

        Raises ValueError for one that has no factor all the same.
        """
        diagonal = hessian.diagonal()
        order = diagonal.argsort(descending=True, stable=True)
        dead = diagonal[order] == 0
        damped = hessian[order][:, order]
        damped.diagonal().add_(dead.float())
        damped.diagonal().add_(damping * damped.diagonal().mean())
        lower, failed = torch.linalg.cholesky_ex(damped)
        del damped
        upper, failed_too = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
        if failed or failed_too:
            raise ValueError("its Hessian has no Cholesky factor")
        if not upper.isfinite().all():
            raise ValueError("its Hessian is not finite")
        return cls(order, dead, upper)


def gptq(weight: Tensor, factor: Factor, grid: Grid) -> Tensor:
    """Return the numbers [N, K] of a grid for a weight [N, K], fp32: the error of each column is
    made good in those after it. A dead column becomes 0."""
    left = weight.t()[factor.order].contiguous()  # [K, N]: rows of it are columns of the weight
    left[factor.dead] = 0
    scales = grid.multiplier.t().contiguous()
    group_of = (factor.order // grid.group_size).tolist()
    numbers, upper = torch.empty_like(left), factor.upper
    for start in range(0, len(left), COLUMNS):
        stop = min(start + COLUMNS, len(left))
        errors = torch.empty_like(left[start:stop])
        for place in range(start, stop):
            scale = scales[group_of[place]]
            numbers[place] = grid.nearest(left[place] / scale)
            error = (left[place] - numbers[place] * scale) / upper[place, place]
            left[place + 1 : stop] -= upper[place, place + 1 : stop, None] * error
            errors[place - start] = error
        left[stop:].addmm_(upper[start:stop, stop:].t(), errors, alpha=-1)
    ordered = torch.empty_like(numbers)
    ordered[factor.order] = numbers
    return ordered.t().contiguous()


def output_energy(change: Tensor, hessian: Tensor) -> float:
    """Return the sum of squares of a linear's outputs under a weight, or a change of one, [N, K],
    for the inputs that a Hessian [K, K] sums up."""
    return float(((change @ hessian) * change).sum(dtype=torch.float64))
