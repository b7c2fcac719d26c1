"""Reference backend: the weight as a dense matrix, multiplied by torch, on any device."""

from __future__ import annotations

import torch

from mtp_kernels.stored_linear.weights import StoredWeight, dequantize


def supports(x: torch.Tensor, weight: StoredWeight) -> bool:
    """Return True for every row and weight."""
    return True


def linear(x: torch.Tensor, weight: StoredWeight) -> torch.Tensor:
    """Return x @ weight.T."""
    return torch.mm(x, dequantize(weight, x.dtype).t())
