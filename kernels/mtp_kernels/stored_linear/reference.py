"""Reference backend: the weight as a dense matrix, multiplied by torch, on any device."""

from __future__ import annotations

import torch

from mtp_kernels.stored_linear.experts import one_by_one
from mtp_kernels.stored_linear.weights import StoredWeight, dequantize


def supports(x: torch.Tensor, weight: StoredWeight) -> bool:
    """Return True for every row and weight."""
    return True


def linear(x: torch.Tensor, weight: StoredWeight) -> torch.Tensor:
    """Return x @ weight.T."""
    values = weight if isinstance(weight, torch.Tensor) else dequantize(weight, torch.float32)
    return torch.mm(x, values.to(x.dtype).t())


def grouped_linear(
    x: torch.Tensor, rows: torch.Tensor | None, ends: torch.Tensor, weight: StoredWeight
) -> torch.Tensor:
    """Return x[rows[p]] @ weight[e].T for pairs p, an expert at a time."""
    return one_by_one(linear, x, rows, ends, weight)
