"""Gated delta net over a recurrent state: the causal convolution and the delta rule of a batch.

A pass stores a request's state after its certain rows alone, and what is needed to take it through
its drafts again: the next pass replays those that were accepted, in the same bits, and a rejected
draft leaves no trace. That is a few rows per request, where a copy of the state for every draft
would be megabytes. `reference` defines the result in plain torch, row by row; `compiled_cpu` takes
columns of the state through all rows of a pass while they are in a core's cache.
"""

from __future__ import annotations

from importlib import import_module
from typing import Protocol, cast

import torch

from mtp_kernels.batch_layout import StateLayout
from mtp_kernels.gated_delta.state import (
    DeltaState,
    check_layout,
    check_rows,
    check_state,
)
from mtp_kernels.sizes import DeltaSizes

__all__ = ["AUTO", "BACKENDS", "DeltaState", "gated_delta"]

# Loaded on first use. A backend is a module with `supports` and `gated_delta`.
BACKENDS = {
    "reference": "mtp_kernels.gated_delta.reference",
    "compiled_cpu": "mtp_kernels.gated_delta.compiled_cpu",
}
# The backend that "auto" means on each torch device type, where it takes the dtype and sizes.
AUTO = {"cpu": "compiled_cpu"}


class Backend(Protocol):
    """Functions of a module named in BACKENDS; all arguments fit each other."""

    def supports(self, inputs: torch.Tensor, sizes: DeltaSizes) -> bool:
        """Return True for rows of a dtype and device, and sizes, that the backend takes."""

    def gated_delta(
        self,
        inputs: torch.Tensor,
        gates: torch.Tensor,
        weight: torch.Tensor,
        state: DeltaState,
        layout: StateLayout,
        sizes: DeltaSizes,
    ) -> torch.Tensor:
        """Return the outputs [T, Hv, V] and advance the state."""


def gated_delta(
    inputs: torch.Tensor,
    gates: torch.Tensor,
    weight: torch.Tensor,
    state: DeltaState,
    layout: StateLayout,
    sizes: DeltaSizes,
    *,
    backend: str = "auto",
) -> torch.Tensor:
    """Return what value heads read from their states [T, Hv, V], before the output norm, in the
    dtype of inputs; advance the requests' states.

    inputs [T, channels] raw rows [queries | keys | values] of all heads, before the convolution;
    gates [T, 2, Hv] float32, the log of each head's decay and its beta; weight [channels, width] of
    the depthwise causal convolution. Each row, replayed ones included, takes in float32:

        q, k, v = silu(convolution of the row and the width - 1 before it)
        q, k = q / |q| / sqrt(K), k / |k|        with 1e-6 added to the squared lengths
        S = exp(log decay) * S                   value head j has key head j // (Hv / Hk)
        S = S + beta * (v - S k) k^T
        output = S q

    state's slots hold S after the replayed and the certain rows; for the drafts of this pass they
    hold raw rows and gates. A row's bits depend on its request's rows alone: not on how those are
    cut into passes, on the batch or on threads. In narrower dtypes the convolution, silu and the
    output are rounded, as transformers' qwen3_next rounds them. Raises TypeError or ValueError for
    arguments that do not fit each other, and ValueError for a backend that does not take them.
    """
    check_rows(inputs, gates, weight, sizes)
    check_state(state, inputs, sizes)
    check_layout(layout, state, len(inputs))
    return _backend(backend, inputs, sizes).gated_delta(
        inputs, gates, weight, state=state, layout=layout, sizes=sizes
    )


def _backend(name: str, inputs: torch.Tensor, sizes: DeltaSizes) -> Backend:
    if name == "auto":
        name = AUTO.get(inputs.device.type, "reference")
        if not _load(name).supports(inputs, sizes):
            name = "reference"
    if name not in BACKENDS:
        raise ValueError(f"backend: expected auto or one of {list(BACKENDS)}, found {name!r}")
    implementation = _load(name)
    if not implementation.supports(inputs, sizes):
        raise ValueError(
            f"backend {name}: does not take {inputs.dtype} on {inputs.device} with keys of "
            f"{sizes.key} elements; use reference"
        )
    return implementation


def _load(name: str) -> Backend:
    return cast(Backend, import_module(BACKENDS[name]))
