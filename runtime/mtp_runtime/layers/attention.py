"""Interface of attention layers, and the forward pass that they see.

Anything that mixes the rows of a request is an attention here: full, sparse or recurrent. It owns
its weights and says what it caches per token; nothing else knows the width of a cache entry.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

import torch

from mtp_kernels.batch_layout import BatchLayout
from mtp_runtime.cache import CacheSpec, LayerCache
from mtp_runtime.layers.linear import Linear
from mtp_runtime.layers.rope import Rope


class Choice(NamedTuple):
    """Cached tokens that every row attends to, in order: the first `counts` [T] of its `slots`
    [T, k], both int32."""

    slots: torch.Tensor
    counts: torch.Tensor


@dataclass(frozen=True)
class ForwardPass:
    """One pass over a batch, as its attention layers see it; backend is of verify_attention.

    choices: tokens to attend to, by what chose them, for the layers after it that share a choice.
    rotations: those of the rows, by what makes them. kept: caches of layers that others read, by
    what those know them as. turned_at: the positions [T] that rows are rotated by, None: their own.
    per_layer: what embeddings per layer have of the rows [T, layers, p], None without such.
    """

    layout: BatchLayout
    backend: str = "auto"
    choices: dict[object, Choice] = field(default_factory=dict)
    rotations: dict[Rope, torch.Tensor] = field(default_factory=dict)
    kept: dict[str, LayerCache] = field(default_factory=dict)
    turned_at: torch.Tensor | None = None
    per_layer: torch.Tensor | None = None

    def cos_sin(self, rope: Rope) -> torch.Tensor:
        """Rotations [T, r/2] of the rows, computed once for all layers that share a Rope."""
        if rope not in self.rotations:
            own = self.layout.positions if self.turned_at is None else self.turned_at
            self.rotations[rope] = rope.cos_sin(own)
        return self.rotations[rope]


class Attention(Protocol):
    """The part of a decoder layer that mixes rows, with what it caches of each.

    has_reference: it obeys forward.backend, so that its float64 reference can be run instead.
    is_static: a pass reads nothing back from the device, so that a graph can hold it.
    """

    has_reference: ClassVar[bool] = True
    is_static: ClassVar[bool] = False

    @property
    def row_elements(self) -> int:
        """Elements that it computes with at a time for each row, for estimates of memory."""

    def new_cache(self, spec: CacheSpec) -> LayerCache:
        """Make the layer's cache; its tensors are uninitialized."""

    def __call__(self, x: torch.Tensor, cache: LayerCache, forward: ForwardPass) -> torch.Tensor:
        """Attend from rows x [T, d], which passed the norm, and return [T, d].

        Writes the cache entries of the rows at forward.layout.slots. A row may use the entries of
        its own request up to itself alone; others may hold anything, NaN included.
        """


class Expanded(NamedTuple):
    """Scaled queries and keys [T, h, k], rotated, and values [T, h, v] of rows, and the gates
    [T, h, v] or [T, h, 1] that multiply what their heads attend to; None where there are none."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    gate: torch.Tensor | None = None


@runtime_checkable
class ExpandedAttention(Attention, Protocol):
    """Attention that also gives queries, keys and values of its rows, for training."""

    @property
    def rope(self) -> Rope: ...

    @property
    def output(self) -> Linear:
        """Projection of attended values, all heads side by side."""

    def expanded(self, x: torch.Tensor, cos_sin: torch.Tensor) -> Expanded:
        """Project x [T, d] for every head (UnsupportedError for layers with a sliding window)."""
