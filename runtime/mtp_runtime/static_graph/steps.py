"""Steps of a model by graphs: batches are padded to buckets of static shapes, which share their
tensors, and one graph is captured for every bucket.

A step is a function of tensors alone, tokens, layout and cache: it may be called, captured with
the tensors of a bucket, or exported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from mtp_checkpoints.errors import UnsupportedError
from mtp_kernels.batch_layout import BatchLayout
from mtp_runtime.cache import PageAllocator
from mtp_runtime.config import EngineConfig
from mtp_runtime.layers.decoder_layer import DecoderLayer
from mtp_runtime.layers.grouped import GroupedExperts
from mtp_runtime.layers.moe import Moe
from mtp_runtime.models.execution import TorchLayers
from mtp_runtime.models.model import Model, ModelCache, States

Replay = Callable[[], States]


@dataclass(frozen=True)
class Bucket:
    """Sizes of a step: requests, and most rows of each, one more than its drafts."""

    requests: int
    q_len: int

    @classmethod
    def of(cls, layout: BatchLayout, most_requests: int) -> Bucket:
        """Return the bucket of a batch: its requests are a power of two, or as many as there may
        be."""
        assert layout.max_q_len is not None, "the host laid the batch out"
        power = 1 << (len(layout.kv_lens) - 1).bit_length()
        return cls(min(power, most_requests), layout.max_q_len)

    @property
    def rows(self) -> int:
        """Rows of the step; an exported graph has no sizes of 1."""
        return max(2, self.requests * self.q_len)

    @property
    def entries(self) -> int:
        """Requests of the step's layout: as many again, for the rows that a batch leaves over."""
        return 2 * self.requests


@dataclass(frozen=True)
class Inputs:
    """Tokens [T] of a step, and their layout."""

    tokens: torch.Tensor
    layout: BatchLayout


class Buffers:
    """Tensors of the inputs of all buckets up to one: a bucket has the first elements of each.

    Rows that a batch leaves over stand for nothing. They belong to further requests, of up to q_len
    rows like all others and without tokens, so that attention computes them: they are all alike,
    and pick the same experts. Their cache entries go to a slot that no request has, and so do those
    of every row before the first batch.
    """

    def __init__(
        self, largest: Bucket, columns: int, *, spare_slot: int, device: torch.device
    ) -> None:
        rows, entries = largest.rows, largest.entries

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self._tokens = zeros(rows, dtype=torch.int64)
        self._positions = zeros(rows, dtype=torch.int64)
        self._slots = zeros(rows, dtype=torch.int64).fill_(spare_slot)
        self._page_table = zeros(entries, max(2, columns))
        self._kv_lens = zeros(entries)
        self._cu_q = zeros(entries + 1)
        _deal(self._cu_q[1:], 0, largest)
        self._spare_slot = spare_slot

    def inputs(self, bucket: Bucket) -> Inputs:
        """Return the tensors of a bucket."""
        rows, entries = bucket.rows, bucket.entries
        layout = BatchLayout(
            positions=self._positions[:rows],
            slots=self._slots[:rows],
            page_table=self._page_table[:entries],
            kv_lens=self._kv_lens[:entries],
            cu_q=self._cu_q[: entries + 1],
            max_q_len=bucket.q_len,
        )
        return Inputs(self._tokens[:rows], layout)

    def fill(self, bucket: Bucket, tokens: torch.Tensor, layout: BatchLayout) -> None:
        """Write a batch into the tensors of its bucket."""
        inputs = self.inputs(bucket)
        static = inputs.layout
        _write(inputs.tokens, tokens, 0)
        _write(static.positions, layout.positions, 0)
        _write(static.slots, layout.slots, self._spare_slot)
        _write(static.kv_lens, layout.kv_lens, 0)
        _write(static.cu_q, layout.cu_q, 0)
        _deal(static.cu_q[len(layout.cu_q) :], len(tokens), bucket)
        requests, columns = layout.page_table.shape
        static.page_table[:requests, :columns].copy_(layout.page_table)


def _write(static: torch.Tensor, values: torch.Tensor, rest: int) -> None:
    """Write values into the first elements of a tensor, and one number into the rest."""
    static[: len(values)].copy_(values)
    static[len(values) :].fill_(rest)


def _deal(ends: torch.Tensor, used: int, bucket: Bucket) -> None:
    """Write where further requests end, which share the rows that are left over."""
    first, step = used + bucket.q_len, bucket.q_len
    stop = first + step * len(ends)
    dealt = torch.arange(first, stop, step, dtype=ends.dtype, device=ends.device)
    ends.copy_(dealt.clamp_(max=bucket.rows))


@dataclass(frozen=True)
class Step:
    """A forward pass over tensors that stay where they are; their contents may change."""

    model: Model
    cache: ModelCache
    inputs: Inputs

    def __call__(self) -> States:
        """Compute the pass anew."""
        return self.model(self.inputs.tokens, self.cache, self.inputs.layout)


class Graphs(Protocol):
    """A way to repeat steps."""

    def capture(self, step: Step) -> Replay:
        """Return what repeats a step; a call may overwrite what any call before it returned."""

    def pool_bytes(self, largest: Step) -> int:
        """Return the memory that is kept for all graphs of steps up to the largest, which is
        captured before any other."""


class StaticSteps:
    """Steps of decoding by graphs; those of prompts are computed operation by operation.

    model, cache: those of the engine. largest: most requests of a batch, and most rows of each
    while it decodes. There are at most as many graphs as powers of two up to the one times the
    other. That of the largest step is captured first, so that the others find room in its memory.

    Raises UnsupportedError for a model whose layers read lengths back to the host.
    """

    def __init__(
        self,
        model: Model,
        cache: ModelCache,
        graphs: Graphs,
        pages: PageAllocator,
        largest: Bucket,
    ) -> None:
        refuse_dynamic_layers(model)
        self._model, self._cache, self._graphs, self._largest = model, cache, graphs, largest
        positions = model.config.max_positions + largest.q_len
        self._buffers = Buffers(
            largest,
            min(pages.pages, pages.pages_for(positions)),
            spare_slot=pages.spare_slot,
            device=model.device,
        )
        self._replays: dict[Bucket, Replay] = {}

    def __call__(self, tokens: torch.Tensor, layout: BatchLayout) -> States:
        """Return the hidden states of every row."""
        bucket = Bucket.of(layout, self._largest.requests)
        if bucket.q_len > self._largest.q_len:
            return self._model(tokens, self._cache, layout)
        if not self._replays:
            self._capture(self._largest)
        self._buffers.fill(bucket, tokens, layout)
        if bucket not in self._replays:
            self._capture(bucket)
        return _rows(self._replays[bucket](), len(tokens))

    def _capture(self, bucket: Bucket) -> None:
        step = Step(self._model, self._cache, self._buffers.inputs(bucket))
        self._replays[bucket] = self._graphs.capture(step)


def steps_by(
    graphs: Graphs | None,
    model: Model,
    cache: ModelCache,
    pages: PageAllocator,
    config: EngineConfig,
) -> Callable[..., States]:
    """Return an engine's steps, functions of tokens and layout: by graphs where they are given,
    else the model itself. Raises as StaticSteps does."""
    if graphs is None:
        return partial(model, cache=cache)
    return StaticSteps(model, cache, graphs, pages, _largest(config))


@torch.inference_mode()
def pool_bytes(graphs: Graphs | None, model: Model, config: EngineConfig) -> int:
    """Return the memory that an engine's graphs keep for themselves, beside its caches.

    Raises as StaticSteps does.
    """
    if graphs is None:
        return 0
    refuse_dynamic_layers(model)
    pages, largest = PageAllocator(1, config.page_size, with_spare=True), _largest(config)
    buffers = Buffers(largest, 1, spare_slot=pages.spare_slot, device=model.device)
    return graphs.pool_bytes(Step(model, model.new_cache(pages), buffers.inputs(largest)))


def _largest(config: EngineConfig) -> Bucket:
    return Bucket(config.max_batch_size, 1 + config.speculation.draft_tokens)


def _rows(states: States, count: int) -> States:
    """Copy the first rows of states, which the next replay overwrites."""
    taps = None if states.taps is None else states.taps[:count].clone()
    return States(states.before[:count].clone(), states.after[:count].clone(), taps)


def layers_of(model: Model) -> tuple[DecoderLayer, ...]:
    """Return the main layers of a model that was loaded for static graphs."""
    assert isinstance(model.layers, TorchLayers), "loaded for static graphs"
    return model.layers.layers


def refuse_dynamic_layers(model: Model) -> None:
    """Raise UnsupportedError if a step of the model reads lengths back to the host."""
    for number, layer in enumerate(layers_of(model)):
        why = _dynamic_part(layer)
        if why is not None:
            raise UnsupportedError(
                "A step of this model cannot be a static graph",
                where=f"layer {number}",
                expected="latent attention over all tokens, and experts that are stored alike",
                found=why,
                todo="Leave the static graph out",
            )


def _dynamic_part(layer: DecoderLayer) -> str | None:
    """Return the part of a layer that the host has to look into, if there is one."""
    feed_forward = layer.feed_forward
    if not layer.attention.is_static:
        return f"attention of kind {type(layer.attention).__name__}"
    if isinstance(feed_forward, Moe) and not isinstance(feed_forward.experts, GroupedExperts):
        return "experts in several formats"
    return None
