"""Memory that a model takes, by the headers of its files alone, before the first weight is read."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
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
from mtp_runtime.models.draft_cost import DraftCost
from mtp_runtime.models.expert_memory import ExpertMemory, MatrixMemory
from mtp_runtime.models.layer_types import layer_type

# Of a process with the runtime's packages, and of the pieces that are read to be packed.
WORKING_BYTES = 1 << 30
FOR_CACHE = 0.9  # of what the model leaves of a limit; the rest is for what a step computes
_TOKENS_SHARE = 8  # of that one part is for cached tokens where routed experts are cached too
# Copies of tensors of the main model that an MTP layer may have. Here they are taken for equal, as
# they nearly always are; one that is not is held too.
_COPIES = (Role.EMBEDDING, Role.HEAD)
_ON_DEMAND = (*_COPIES, Role.ROUTED_EXPERT)


@dataclass(frozen=True)
class PageSizes:
    """Tokens of a page of cache, and of the whole cache: those that are given, or at most some."""

    page_tokens: int
    most_tokens: int
    tokens: int | None = None

    def tokens_within(self, room_bytes: int, token_bytes: int) -> int:
        """Return the tokens of a cache in so many bytes, or what was given; one page at least."""
        pages = min(self.most_tokens, room_bytes // token_bytes) // self.page_tokens
        if self.tokens is not None:
            pages = self.tokens // self.page_tokens
        return max(1, pages) * self.page_tokens


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that a model takes: all its weights, and a token in the cache.

    dtype is that of dense matrices, dense_bytes those of the weights that have it; others are kept
    as they are stored. experts: routed ones of the main layers, which a cache may hold; None where
    none can. slots: experts that it holds, whose bytes are weight_bytes'; None: all are loaded.
    drafts: cost of those of MTP layers; None without these, and where weights are read on demand.
    """

    weight_bytes: int
    dense_bytes: int
    token_bytes: int
    dtype: torch.dtype
    experts: ExpertMemory | None = None
    slots: int | None = None
    drafts: DraftCost | None = None

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
        weight_bytes = self.weight_bytes - self.dense_bytes + dense
        experts = None if self.experts is None else self.experts.in_dtype(self.dtype, dtype)
        return replace(
            self, weight_bytes=weight_bytes, dense_bytes=dense, dtype=dtype, experts=experts
        )

    def beside(self, other: MemoryPlan) -> MemoryPlan:
        """Return the plan of this model and another one."""
        return replace(
            self,
            weight_bytes=self.weight_bytes + other.weight_bytes,
            dense_bytes=self.dense_bytes + other.dense_bytes,
            token_bytes=self.token_bytes + other.token_bytes,
        )

    @property
    def always_bytes(self) -> int:
        """Bytes of the weights but for routed experts of main layers."""
        if self.experts is None:
            return self.weight_bytes
        held = self.experts.held_bytes if self.slots is None else self.slot_bytes
        return self.weight_bytes - held

    @property
    def slot_bytes(self) -> int:
        """Bytes of the experts' cache."""
        return 0 if self.experts is None else (self.slots or 0) * self.experts.slot_bytes

    @property
    def step_cost(self) -> DraftCost | None:
        """Cost of drafts by what a step waits for: by what it reads, where experts are cached."""
        return self.drafts if self.drafts is None or self.slots is None else self.drafts.read

    @property
    def holds_two_tokens(self) -> bool:
        """True where the experts' cache has room for those of two tokens in all layers."""
        return self.experts is None or (self.slots or 0) >= 2 * self.experts.row_picks

    def with_slots(self, slots: int) -> MemoryPlan:
        """Return the plan with a cache of at most so many routed experts."""
        assert self.experts is not None, "a model with routed experts"
        held = min(slots, self.experts.number)
        loaded = self.experts.dense_bytes if self.slots is None else 0
        return replace(
            self,
            weight_bytes=self.always_bytes + held * self.experts.slot_bytes,
            dense_bytes=self.dense_bytes - loaded,
            slots=held,
        )

    def with_dense(self, elements: int) -> MemoryPlan:
        """Return the plan with more elements of dense matrices."""
        more = elements * self.dtype.itemsize
        return self.beside(MemoryPlan(more, more, 0, self.dtype))

    def with_expert_cache(self, room_bytes: int, sizes: PageSizes) -> tuple[MemoryPlan, int] | None:
        """Return the plan with as many routed experts in memory as fit into so many bytes beside
        what every token uses, and the tokens of cache beside them, an eighth of what is left unless
        given; None where too few fit for a token in one layer."""
        if self.experts is None:
            return None
        room = int((room_bytes - self.always_bytes) * FOR_CACHE)
        tokens = sizes.tokens_within(room // _TOKENS_SHARE, self.token_bytes)
        slots = (room - tokens * self.token_bytes) // self.experts.slot_bytes
        return (self.with_slots(slots), tokens) if slots >= self.experts.layer_picks else None

    def bytes_with_experts(self, number: int, sizes: PageSizes) -> int:
        """Return the bytes within which so many routed experts are in memory."""
        assert self.experts is not None, "a model with routed experts"
        taken = number * self.experts.slot_bytes + sizes.page_tokens * self.token_bytes
        if sizes.tokens is None:
            taken = taken * _TOKENS_SHARE // (_TOKENS_SHARE - 1)
        else:
            taken += sizes.tokens * self.token_bytes
        return self.always_bytes + math.ceil(taken / FOR_CACHE)

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
        cached = self._expert_cache(free, cache_tokens)
        if self.slots is not None and cached is not None:
            return cached
        smaller = self.in_dtype(torch.bfloat16)
        room = free - self.weight_bytes - WORKING_BYTES
        if smaller.needed_bytes(cache_tokens) <= free:
            return f"--dtype bfloat16 takes {_gb(smaller.needed_bytes(cache_tokens))}"
        if self.token_bytes and room >= self.token_bytes:
            return f"A cache of {room // self.token_bytes:,} tokens fits: --max-memory {free}"
        if cached is not None:
            return cached
        return "Use a machine with more memory; verify --stream holds one layer at a time"

    def _expert_cache(self, free: int, cache_tokens: int) -> str | None:
        """Return the limit of memory within which routed experts are read from disk as they are
        used; None where that does not fit either."""
        if self.experts is None:
            return None
        limit = min(
            free, int(self.always_bytes + (free - WORKING_BYTES - self.always_bytes) / FOR_CACHE)
        )
        cached = self.with_expert_cache(
            limit - WORKING_BYTES, PageSizes(64, cache_tokens or 1 << 15)
        )
        if cached is None:
            return None
        return (
            f"--max-memory {limit} fits: at least {cached[0].slots:,} of {self.experts.number:,}"
            " routed experts are then in memory, and the others are read from disk when they are"
            " used"
        )


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
    # Where kernels run every layer, in one process.
    reads_experts = source.packs and source.split.size == 1 and not expanded.prefixes
    matrices = dict(_matrices(source, dense, expanded, with_mtp=with_mtp))
    sizes = matrices.values()
    elements = sum(layer_type(layer.attention).cached(layer.attention) for layer in layers)
    return MemoryPlan(
        weight_bytes=sum(one.held_bytes for one in sizes),
        dense_bytes=sum(one.held_bytes for one in sizes if one.is_dense),
        token_bytes=elements * source.dtype.itemsize,
        dtype=dense or source.dtype,
        experts=ExpertMemory.of(spec, matrices) if reads_experts else None,
        drafts=None if source.on_demand else DraftCost.of(spec, matrices),
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
            halves = (
                (layer.attention, layer.attention_prefix),
                (layer.feed_forward, layer.feed_forward_prefix),
            )
            stacks = [layer_type(part).stacks(part, own, max_positions) for part, own in halves]
            if None in stacks or layer.norms_after:
                prefixes.append(f"{layer.prefix}.")
                continue
            for stack in chain.from_iterable(found for found in stacks if found is not None):
                members = [weight_name(module) for module in stack]
                if len({source.packed_form(name) for name in members}) > 1:
                    names.update(members)
        return cls(tuple(prefixes), frozenset(names))


def _matrices(
    source: WeightSource, dense: torch.dtype | None, expanded: _Expanded, *, with_mtp: bool
) -> Iterable[tuple[str, MatrixMemory]]:
    """Yield the memory of each weight by its name; a vector is a matrix of its entries."""
    for weight in source.on_disk:
        spec = weight.stored.weight
        in_mtp = spec.mtp_layer is not None
        if (in_mtp and (not with_mtp or spec.role in _COPIES)) or (
            source.on_demand and spec.role in _ON_DEMAND
        ):
            continue
        ranks = source.split.size if len(spec.shape) == 2 else 1
        size, is_dense = _held(source, weight, dense, expanded)
        rows, unit = prod(spec.shape[:1]), weight.stored.format.scale_rows
        filled = 0 if is_dense or unit == 1 else -spec.shape[1] % unit
        yield (
            spec.name,
            MatrixMemory(
                outputs=rows,
                held_bytes=size // ranks,
                stride_bytes=size // max(1, rows) + filled,
                is_dense=is_dense,
                stored_bytes=weight.size_bytes,
            ),
        )


def _held(
    source: WeightSource, weight: WeightOnDisk, dense: torch.dtype | None, expanded: _Expanded
) -> tuple[int, bool]:
    """Return a whole weight's bytes in memory, and whether it is a matrix that becomes dense."""
    spec = weight.stored.weight
    elements = prod(spec.shape)
    if spec.role is Role.EMBEDDING:
        kept = weight.tensors[0].dtype is DType.BF16
        return elements * (2 if kept else source.dtype.itemsize), False
    if len(spec.shape) != 2 or spec.role is Role.ROUTER:
        return elements * source.dtype.itemsize, False
    if dense is None:
        return weight.size_bytes, False
    if source.packs and spec.name.startswith(expanded.prefixes):
        return elements * source.dtype.itemsize, False
    if spec.name not in expanded.names and source.packed_form(spec.name) is not None:
        return weight.stored.format.row_bytes(weight.tensors, spec.shape[0]), False
    return elements * dense.itemsize, True


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
