"""A stored weight whose rows or columns are in another order or multiplied; nothing of it is
copied."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mtp_runtime.layers.linear import Linear, Weight


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


def halves_exchanged(linear: Linear) -> Linear:
    """The linear with the two halves of its input exchanged."""
    size = linear.weight.shape[1]
    return Linear(ChangedWeight(linear.weight, columns=torch.arange(size).roll(size // 2)))


def columns_scaled(linear: Linear, columns: slice, factor: float) -> Linear:
    """The linear with some columns of its weight multiplied by a factor."""
    factors = torch.ones(linear.weight.shape[1])
    factors[columns] = factor
    return Linear(ChangedWeight(linear.weight, column_factors=factors))
