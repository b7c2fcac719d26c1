"""Steps of a model by graphs: one is captured for every bucket that batches fall into.

A step is a function of tensors alone, tokens, layout and cache: it may be called, captured with
the tensors of a bucket, or exported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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
from mtp_runtime.static_graph.buckets import Bucket, Buffers, Inputs

Replay = Callable[[], States]


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


@dataclass(frozen=True)
class EagerSteps:
    """Steps that are computed operation by operation."""

    model: Model
    cache: ModelCache

    def __call__(self, tokens: torch.Tensor, layout: BatchLayout) -> States:
        return self.model(tokens, self.cache, layout)


class StaticSteps:
    """Steps of decoding by graphs; those of prompts are computed operation by operation.

    largest: most requests of a batch, and most rows of each while it decodes. There are at most as
    many graphs as powers of two up to the one times the other. That of the largest step is captured
    first, so that the others find room in its memory.

    Raises UnsupportedError for a model whose layers read lengths back to the host.
    """

    def __init__(
        self, eager: EagerSteps, graphs: Graphs, pages: PageAllocator, largest: Bucket
    ) -> None:
        refuse_dynamic_layers(eager.model)
        self._eager, self._graphs, self._largest = eager, graphs, largest
        positions = eager.model.config.max_positions + largest.q_len
        self._buffers = Buffers(
            largest,
            min(pages.pages, pages.pages_for(positions)),
            spare_slot=pages.spare_slot,
            device=eager.model.device,
        )
        self._replays: dict[Bucket, Replay] = {}

    @property
    def buckets(self) -> list[Bucket]:
        """Buckets that have a graph."""
        return list(self._replays)

    def __call__(self, tokens: torch.Tensor, layout: BatchLayout) -> States:
        """Return the hidden states of every row."""
        bucket = Bucket.of(layout, self._largest.requests)
        if bucket.q_len > self._largest.q_len:
            return self._eager(tokens, layout)
        if not self._replays:
            self._capture(self._largest)
        self._buffers.fill(bucket, tokens, layout)
        if bucket not in self._replays:
            self._capture(bucket)
        return _rows(self._replays[bucket](), len(tokens))

    def _capture(self, bucket: Bucket) -> None:
        step = Step(self._eager.model, self._eager.cache, self._buffers.inputs(bucket))
        self._replays[bucket] = self._graphs.capture(step)


def steps_by(
    graphs: Graphs | None, eager: EagerSteps, pages: PageAllocator, config: EngineConfig
) -> EagerSteps | StaticSteps:
    """Return an engine's steps, by graphs where they are given. Raises as StaticSteps does."""
    if graphs is None:
        return eager
    return StaticSteps(eager, graphs, pages, _largest(config))


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
