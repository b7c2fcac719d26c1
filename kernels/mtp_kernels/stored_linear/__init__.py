"""Linear layers over weights as they are stored: no matrix is ever expanded as a whole.

`reference` defines the result in plain torch; `compiled_cpu` expands tiles that stay in cache.
"""

from __future__ import annotations

from importlib import import_module
from typing import Protocol, cast

import torch

from mtp_kernels.stored_linear.weights import StoredWeight, dequantize, shape_of

__all__ = ["BACKENDS", "StoredWeight", "dequantize", "linear"]

# Loaded on first use. A backend is a module with `supports` and `linear`.
BACKENDS = {
    "reference": "mtp_kernels.stored_linear.reference",
    "compiled_cpu": "mtp_kernels.stored_linear.compiled_cpu",
}


class Backend(Protocol):
    """Functions of a module named in BACKENDS; shapes of x and weight fit each other."""

    def supports(self, x: torch.Tensor, weight: StoredWeight) -> bool:
        """Return True for rows and a weight that the backend multiplies."""

    def linear(self, x: torch.Tensor, weight: StoredWeight) -> torch.Tensor:
        """Return x @ weight.T. Codes that are NaN need not be refused, but must give NaN."""


def linear(x: torch.Tensor, weight: StoredWeight, *, backend: str = "auto") -> torch.Tensor:
    """Return y [T, N] = x [T, K] @ weight.T for a stored weight [N, K], in the dtype of x.

    Products are added in float32 where x is float32. Raises ValueError for shapes that do not fit,
    for scales that no quantization makes and for NaN codes.
    """
    if x.ndim != 2 or x.shape[1] != shape_of(weight)[1]:
        raise ValueError(f"x: expected [T, {shape_of(weight)[1]}], found {list(x.shape)}")
    if backend == "auto":
        backend = "compiled_cpu" if x.device.type == "cpu" else "reference"
        if not _load(backend).supports(x, weight):
            backend = "reference"
    if backend not in BACKENDS:
        raise ValueError(f"backend: expected auto or one of {list(BACKENDS)}, found {backend!r}")
    implementation = _load(backend)
    if not implementation.supports(x, weight):
        raise ValueError(f"backend {backend}: does not multiply {x.dtype} rows on {x.device}")
    y = implementation.linear(x, weight)
    if not isinstance(weight, torch.Tensor) and not y.isfinite().all():
        dequantize(weight, torch.float32)  # a damaged code shows as NaN; this says where it is
    return y


def _load(name: str) -> Backend:
    return cast(Backend, import_module(BACKENDS[name]))
