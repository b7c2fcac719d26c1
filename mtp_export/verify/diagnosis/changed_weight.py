"""A stored weight whose rows or columns are in another order or multiplied, of which nothing is
copied, and modules with such weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch

from mtp_runtime.layers.linear import Linear, Weight
from mtp_runtime.layers.mla import Halves, StoredHalves
from mtp_runtime.layers.moe import HeldExperts, Mlp, Moe


@dataclass(frozen=True)
class ChangedWeight:
    """A weight with its rows and columns in the order of rows [out] and columns [in], multiplied by
    row_factors [out] and column_factors [in]; None: as they are."""

    weight: Weight
    rows: torch.Tensor | None = None
    columns: torch.Tensor | None = None
    row_factors: torch.Tensor | None = None
    column_factors: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the matrix [out, in] (ValueError for codes or scales that are damaged)."""
        matrix = self.weight.dequantize(dtype)
        if self.columns is not None:
            matrix = matrix[:, self.columns]
        if self.column_factors is not None:
            matrix = matrix * self.column_factors.to(matrix)
        return self._of_rows(matrix.t()).t()

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Return x @ weight.T (ValueError as dequantize)."""
        if self.column_factors is not None:
            x = x * self.column_factors.to(x)
        if self.columns is not None:
            x = torch.empty_like(x).index_copy_(1, self.columns.to(x.device), x)
        return self._of_rows(self.weight.product(x))

    def _of_rows(self, outputs: torch.Tensor) -> torch.Tensor:
        if self.rows is not None:
            outputs = outputs[:, self.rows]
        if self.row_factors is not None:
            outputs = outputs * self.row_factors.to(outputs)
        return outputs


@dataclass(frozen=True)
class InRows:
    """A weight that is another one in some of its rows."""

    weight: Weight
    other: Weight
    rows: slice

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the matrix [out, in] (ValueError for codes or scales that are damaged)."""
        matrix = self.weight.dequantize(dtype).clone()
        matrix[self.rows] = self.other.dequantize(dtype)[self.rows]
        return matrix

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Return x @ weight.T (ValueError as dequantize)."""
        outputs = self.weight.product(x)
        outputs[:, self.rows] = self.other.product(x)[:, self.rows]
        return outputs


def reordered(linear: Linear, order: torch.Tensor) -> Linear:
    """The linear with its outputs in another order [out]."""
    return Linear(ChangedWeight(linear.weight, rows=order))


def gate_and_up_exchanged(mlp: Mlp) -> Mlp:
    """The gated MLP with gate and up in each other's place."""
    rows = mlp.gate_up.weight.shape[0]
    return replace(mlp, gate_up=reordered(mlp.gate_up, torch.arange(rows).roll(rows // 2)))


def halves_exchanged(linear: Linear) -> Linear:
    """The linear with the two halves of its input exchanged."""
    size = linear.weight.shape[1]
    return Linear(ChangedWeight(linear.weight, columns=torch.arange(size).roll(size // 2)))


def columns_scaled(linear: Linear, columns: slice, factor: float) -> Linear:
    """The linear with some columns of its weight multiplied by a factor."""
    factors = torch.ones(linear.weight.shape[1])
    factors[columns] = factor
    return Linear(ChangedWeight(linear.weight, column_factors=factors))


def with_parts(whole: Any, changed: Callable[[Any], Any]) -> Any:
    """Return a part of a module with what `changed` makes of each object in it, None leaving it as
    it is; of a mixture the experts alone are changed, which are then held in memory."""
    if (other := changed(whole)) is not None:
        return other
    if isinstance(whole, Moe):
        held = tuple(with_parts(one, changed) for one in whole.experts.every())
        return replace(whole, experts=HeldExperts(held))
    if not is_dataclass(whole) or isinstance(whole, type):
        return whole
    values = {field.name: getattr(whole, field.name) for field in fields(whole)}
    others = {name: with_parts(value, changed) for name, value in values.items()}
    different = {name: other for name, other in others.items() if other is not values[name]}
    return replace(whole, **different) if different else whole


def linears_scaled(whole: Any, factor: float) -> Any:
    """Return a part of a module with every linear's weight multiplied by a factor."""

    def changed(part: Any) -> Any:
        if isinstance(part, Linear):
            factors = torch.full((part.weight.shape[0],), factor)
            return Linear(ChangedWeight(part.weight, row_factors=factors))
        if isinstance(part, Halves | StoredHalves):
            return Halves(part.dense.key_up * factor, part.dense.value_up * factor)
        return None

    return with_parts(whole, changed)
