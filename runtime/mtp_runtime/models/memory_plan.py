"""Memory that a model takes, by the headers of its files alone, before the first weight is read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from math import prod
from pathlib import Path

import torch

from mtp_checkpoints.dtypes import DType
from mtp_checkpoints.errors import ResourceError
from mtp_checkpoints.families.base import Role, weight_name
from mtp_checkpoints.families.spec import LayerSpec, ModelSpec
from mtp_checkpoints.free_memory import free_memory
from mtp_checkpoints.weights.weight_values import WeightOnDisk
from mtp_runtime.loading.weight_source import WeightSource
from mtp_runtime.models.layer_types import layer_type

# Of a process with the runtime's packages, and of the pieces that are read to be packed.
WORKING_BYTES = 1 << 30
# Copies of tensors of the main model that an MTP layer may have. Here they are taken for equal, as
# they nearly always are; one that is not is held too.
_COPIES = (Role.EMBEDDING, Role.HEAD)
_ON_DEMAND = (*_COPIES, Role.ROUTED_EXPERT)


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that a model takes: all its weights, and a token in the cache.

    dtype is that of dense matrices, dense_bytes those of the weights that have it; others are kept
    as they are stored.
    """

    weight_bytes: int
    dense_bytes: int
    token_bytes: int
    dtype: torch.dtype

    @property
    def dtype_name(self) -> str:
        """Name of the dtype, as options have it."""
        return str(self.dtype).removeprefix("torch.")

    def needed_bytes(self, cache_tokens: int) -> int:
        """Return what a run takes at most, with a cache of so many tokens."""
        return self.weight_bytes + self.token_bytes * cache_tokens + WORKING_BYTES

    def in_dtype(self, dtype: torch.dtype) -> MemoryPlan:
        """Return the plan with dense matrices of another dtype."""
        dense = self.dense_bytes // self.dtype.itemsize * dtype.itemsize
        return MemoryPlan(
            self.weight_bytes - self.dense_bytes + dense, dense, self.token_bytes, dtype
        )

    def beside(self, other: MemoryPlan) -> MemoryPlan:
        """Return the plan of this model and another one."""
        return MemoryPlan(
            self.weight_bytes + other.weight_bytes,
            self.dense_bytes + other.dense_bytes,
            self.token_bytes + other.token_bytes,
            self.dtype,
        )

    def with_dense(self, elements: int) -> MemoryPlan:
        """Return the plan with more elements of dense matrices."""
        more = elements * self.dtype.itemsize
        return self.beside(MemoryPlan(more, more, 0, self.dtype))

    def shortage(self, cache_tokens: int) -> tuple[str, int] | None:
        """Return what of this machine's memory leaves too little, and its bytes; None where a run
        fits, or the system does not tell."""
        limits = free_memory().items()
        name, free = min(limits, key=lambda limit: limit[1], default=("", None))
        return None if free is None or free >= self.needed_bytes(cache_tokens) else (name, free)

    def check(self, folder: Path, cache_tokens: int) -> None:
        """Refuse to load what does not fit into this machine's memory (ResourceError)."""
        needed, shortage = self.needed_bytes(cache_tokens), self.shortage(cache_tokens)
        if shortage is None:
            return
        name, free = shortage
        cache = f" a cache of {cache_tokens:,} tokens {_gb(self.token_bytes * cache_tokens)},"
        dense = f" of which {_gb(self.dense_bytes)} become {self.dtype_name},"
        parts = (dense if self.dense_bytes else "") + (cache if cache_tokens else "")
        raise ResourceError(
            "The model does not fit into memory",
            where=folder,
            expected=f"{_gb(needed)}: weights {_gb(self.weight_bytes)},{parts}"
            f" and {_gb(WORKING_BYTES)} to work with",
            found=f"{name} of {_gb(free)}",
            todo=f"No weight was read. {self._what_fits(free, cache_tokens)}",
        )

    def _what_fits(self, free: int, cache_tokens: int) -> str:
        """Return what to do where this does not fit."""
        smaller = self.in_dtype(torch.bfloat16)
        room = free - self.weight_bytes - WORKING_BYTES
        if smaller.needed_bytes(cache_tokens) <= free:
            return f"--dtype bfloat16 takes {_gb(smaller.needed_bytes(cache_tokens))}"
        if self.token_bytes and room >= self.token_bytes:
            return f"A cache of {room // self.token_bytes:,} tokens fits: --max-memory {free}"
        return "Use a machine with more memory; verify --stream holds one layer at a time"


def planned(
    source: WeightSource,
    spec: ModelSpec,
    dense: torch.dtype | None,
    *,
    with_mtp: bool,
    max_positions: int,
) -> MemoryPlan:
    """Plan the memory of a model for contexts of at most `max_positions` tokens.

    dense: dtype of matrices that become dense when they are loaded, but for those that kernels pack
    as they are stored; None where all stay so. Of several ranks, each holds its share of every
    matrix.
    """
    layers = [*spec.layers, *(mtp.layer for mtp in spec.mtp if with_mtp)]
    expanded = _Expanded.of(source, layers, max_positions)
    sizes = list(_sizes(source, dense, expanded, with_mtp=with_mtp))
    dense_bytes = sum(size for size, is_dense in sizes if is_dense)
    elements = sum(layer_type(layer.attention).cached(layer.attention) for layer in layers)
    return MemoryPlan(
        weight_bytes=sum(size for size, _ in sizes),
        dense_bytes=dense_bytes,
        token_bytes=elements * source.dtype.itemsize,
        dtype=dense or source.dtype,
    )


@dataclass(frozen=True)
class _Expanded:
    """Weights that are not packed as they are stored: of layers under some prefixes, which torch
    runs in float32, and those whose stack is stored in several forms."""

    prefixes: tuple[str, ...]
    names: frozenset[str]

    @classmethod
    def of(cls, source: WeightSource, layers: Iterable[LayerSpec], max_positions: int) -> _Expanded:
        prefixes, names = [], set()
        for layer in layers:
            parts = (
                (layer.attention, layer.attention_prefix),
                (layer.feed_forward, layer.feed_forward_prefix),
            )
            stacks = [layer_type(part).stacks(part, own, max_positions) for part, own in parts]
            if None in stacks:
                prefixes.append(f"{layer.prefix}.")
                continue
            for stack in chain.from_iterable(found for found in stacks if found is not None):
                members = [weight_name(module) for module in stack]
                if len({source.packed_form(name) for name in members}) > 1:
                    names.update(members)
        return cls(tuple(prefixes), frozenset(names))


def _sizes(
    source: WeightSource, dense: torch.dtype | None, expanded: _Expanded, *, with_mtp: bool
) -> Iterable[tuple[int, bool]]:
    """Yield the bytes of each weight, and whether it is a matrix that becomes dense."""
    for weight in source.on_disk:
        spec = weight.stored.weight
        in_mtp = spec.mtp_layer is not None
        if (in_mtp and (not with_mtp or spec.role in _COPIES)) or (
            source.on_demand and spec.role in _ON_DEMAND
        ):
            continue
        ranks = source.split.size if len(spec.shape) == 2 else 1
        if spec.role is Role.EMBEDDING:
            kept = weight.tensors[0].dtype is DType.BF16
            yield prod(spec.shape) * (2 if kept else source.dtype.itemsize) // ranks, False
        elif len(spec.shape) != 2 or spec.role is Role.ROUTER:
            yield prod(spec.shape) * source.dtype.itemsize // ranks, False
        elif dense is None:
            yield sum(tensor.size_bytes for tensor in weight.tensors) // ranks, False
        elif source.packs and spec.name.startswith(expanded.prefixes):
            yield prod(spec.shape) * source.dtype.itemsize // ranks, False
        elif spec.name not in expanded.names and source.packed_form(spec.name) is not None:
            yield _packed_bytes(weight) // ranks, False
        else:
            yield prod(spec.shape) * dense.itemsize // ranks, True


def _packed_bytes(weight: WeightOnDisk) -> int:
    """Return the bytes of a matrix that is packed as it is stored, with float32 scales."""
    codes, *scales = weight.tensors
    if not scales:
        return codes.size_bytes
    rows = weight.stored.weight.shape[0]
    return codes.size_bytes + 4 * rows * prod(scales[0].shape[1:])


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
