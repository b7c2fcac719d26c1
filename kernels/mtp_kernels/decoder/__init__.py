"""Decoder layers and the recursion of their MTP module, by exchangeable backends.

A backend runs whole layers: latent or grouped-query attention over a paged cache, dense or
mixture-of-experts MLP, norms and projections. The tests hold each to a definition in plain torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import cast

import torch

from mtp_kernels.decoder.interface import (
    Backend,
    Decoder,
    DecoderConfig,
    GroupedWeights,
    LatentWeights,
    LayerKind,
    LayerWeights,
    Matrix,
    ModuleInputs,
    PackedLayer,
    Projection,
    Recursion,
    RecursionParts,
    RowStep,
    StoredMatrix,
)
from mtp_kernels.decoder.sharded import (
    LayerShard,
    Pairs,
    ShardedDecoder,
    ShardedPass,
    ShardingBackend,
)

__all__ = [
    "AUTO",
    "BACKENDS",
    "DTYPES",
    "Backend",
    "Decoder",
    "DecoderConfig",
    "GroupedWeights",
    "LatentWeights",
    "LayerKind",
    "LayerShard",
    "LayerWeights",
    "Matrix",
    "ModuleInputs",
    "PackedLayer",
    "Pairs",
    "Projection",
    "Recursion",
    "RecursionParts",
    "RowStep",
    "ShardedDecoder",
    "ShardedPass",
    "ShardingBackend",
    "StoredMatrix",
    "make_backend",
]

# Loaded on first use. A backend is a module with a class `Backend`, which takes a dtype of DTYPES.
BACKENDS = {"compiled_cpu": "mtp_kernels.decoder.compiled_cpu"}
# The backend that "auto" means on each torch device type.
AUTO = {"cpu": "compiled_cpu"}


DTYPES = (torch.float32, torch.bfloat16)


def make_backend(
    name: str = "auto", device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> Backend:
    """Return a new backend for the parts of one model; "auto" goes by the device.

    dtype: in which matrices are kept, but for routers'; all is computed in float32. Raises
    ValueError for a name that is not in BACKENDS, a dtype that is not in DTYPES, and for "auto" on
    a device without a backend.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype: expected one of {DTYPES}, found {dtype}")
    kind = torch.device(device).type
    if name == "auto":
        if kind not in AUTO:
            raise ValueError(f"backend auto: expected a device of {sorted(AUTO)}, found {device}")
        name = AUTO[kind]
    if name not in BACKENDS:
        raise ValueError(f"backend: expected auto or one of {sorted(BACKENDS)}, found {name!r}")
    return cast(Backend, import_module(BACKENDS[name]).Backend(dtype))
