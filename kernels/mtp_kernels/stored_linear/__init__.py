"""Linear layers over weights as they are stored: no matrix is ever expanded as a whole.

`reference` defines the result in plain torch; `compiled_cpu` expands tiles that stay in cache,
`triton_cuda` tiles in a GPU's registers.
"""

from __future__ import annotations

from importlib import import_module
from typing import Protocol, cast

import torch

from mtp_kernels.stored_linear.experts import expert, stack
from mtp_kernels.stored_linear.weights import StoredWeight, dequantize, shape_of

__all__ = [
    "BACKENDS",
    "StoredWeight",
    "dequantize",
    "expert",
    "grouped_linear",
    "linear",
    "stack",
]

# Loaded on first use. A backend is a module with `supports`, `linear` and `grouped_linear`.
BACKENDS = {
    "reference": "mtp_kernels.stored_linear.reference",
    "compiled_cpu": "mtp_kernels.stored_linear.compiled_cpu",
    "triton_cuda": "mtp_kernels.stored_linear.triton_cuda",
}
# The backend that "auto" means on each torch device type, where it multiplies the rows and weight.
AUTO = {"cpu": "compiled_cpu", "cuda": "triton_cuda"}


class Backend(Protocol):
    """Functions of a module named in BACKENDS; shapes of x and weight fit each other."""

    def supports(self, x: torch.Tensor, weight: StoredWeight) -> bool:
        """Return True for rows and a weight, or one of experts, that the backend multiplies."""

    def linear(self, x: torch.Tensor, weight: StoredWeight) -> torch.Tensor:
        """Return x @ weight.T. Codes that are NaN need not be refused, but must give NaN."""

    def grouped_linear(
        self, x: torch.Tensor, rows: torch.Tensor | None, ends: torch.Tensor, weight: StoredWeight
    ) -> torch.Tensor:
        """Return x[rows[p]] @ weight[e].T for pairs p; weight is that of all experts."""


def linear(x: torch.Tensor, weight: StoredWeight, *, backend: str = "auto") -> torch.Tensor:
    """Return y [T, N] = x [T, K] @ weight.T for a stored weight [N, K], in the dtype of x.

    Products are added in float32 where x is float32. Raises ValueError for shapes that do not fit;
    on a CPU for scales that no quantization makes and for NaN codes too: elsewhere that would
    wait for the device, and NaN codes give NaN.
    """
    if x.ndim != 2 or x.shape[1] != shape_of(weight)[1]:
        raise ValueError(f"x: expected [T, {shape_of(weight)[1]}], found {list(x.shape)}")
    y = _backend(x, weight, backend).linear(x, weight)
    on_cpu = x.device.type == "cpu"
    if on_cpu and not isinstance(weight, torch.Tensor) and not y.isfinite().all():
        dequantize(weight, torch.float32)  # a damaged code shows as NaN; this says where it is
    return y


def grouped_linear(
    x: torch.Tensor,
    rows: torch.Tensor | None,
    ends: torch.Tensor,
    weight: StoredWeight,
    *,
    backend: str = "auto",
) -> torch.Tensor:
    """Return y [P, N] with y[p] = x[rows[p]] @ weight[e].T, in the dtype of x.

    x [T, K]; rows [P] integers, None for rows 0 to T - 1; ends [E] int32, ascending to P: the pairs
    from ends[e - 1] to ends[e] are expert e's; weight holds [E, N, K], as `stack` makes it. With
    triton_cuda `ends` stays on the device. Raises ValueError for shapes that do not fit.
    """
    one = expert(weight, 0)
    if x.ndim != 2 or x.shape[1] != shape_of(one)[1] or ends.dtype != torch.int32:
        raise ValueError(
            f"x and ends: expected [T, {shape_of(one)[1]}] and torch.int32, "
            f"found {list(x.shape)} and {ends.dtype}"
        )
    return _backend(x, weight, backend).grouped_linear(x, rows, ends, weight)


def _backend(x: torch.Tensor, weight: StoredWeight, name: str) -> Backend:
    if name == "auto":
        name = AUTO.get(x.device.type, "reference")
        if not _load(name).supports(x, weight):
            name = "reference"
    if name not in BACKENDS:
        raise ValueError(f"backend: expected auto or one of {list(BACKENDS)}, found {name!r}")
    implementation = _load(name)
    if not implementation.supports(x, weight):
        raise ValueError(f"backend {name}: does not multiply {x.dtype} rows on {x.device}")
    return implementation


def _load(name: str) -> Backend:
    return cast(Backend, import_module(BACKENDS[name]))
