"""Execution of a model's parts, by torch or by compiled kernels: layers, norms, projections, heads
and the recursion of modules that draft."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import torch

from mtp_kernels.batch_layout import BatchLayout
from mtp_kernels.decoder import ModuleInputs, Projection, Recursion, RowStep
from mtp_runtime.cache import Cache, CacheSpec, LayerCaches, PageAllocator
from mtp_runtime.layers.attention import Attention, ForwardPass
from mtp_runtime.layers.decoder_layer import DecoderLayer
from mtp_runtime.layers.embedding import Embedding
from mtp_runtime.layers.linear import Linear
from mtp_runtime.layers.norm import RmsNorm


class Layers(Protocol):
    """Consecutive decoder layers, however they are run."""

    def __len__(self) -> int: ...

    def new_cache(self, spec: CacheSpec) -> Cache:
        """Make the cache of these layers; its tensors are uninitialized."""

    def __call__(
        self,
        x: torch.Tensor,
        cache: Cache,
        forward: ForwardPass,
        attention_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Take the stream x [T, d], which may be overwritten, through the layers.

        forward: the pass, one for all layers of a model, however they are cut into runs.
        attention_input [T, w]: what attention takes in a first layer without an input norm.
        """

    def each(self) -> Iterator[Layers]:
        """Yield every layer by itself."""
        return (self.part(at, at + 1) for at in range(len(self)))

    def part(self, first: int, stop: int) -> Layers:
        """Return layers [first, stop), at least one."""


class Execution(Protocol):
    """Backend that runs a model's parts: torch, or compiled kernels that are made of them."""

    @property
    def packs(self) -> bool:
        """True where linears are packed for kernels, straight from their files."""

    def layers(self, layers: Iterable[DecoderLayer]) -> Layers: ...

    def norm(self, norm: RmsNorm) -> RowStep: ...

    def linear(self, linear: Linear) -> Projection: ...

    def recursion(self, module: DraftModule) -> Recursion | None:
        """Return one call that drafts all tokens of a recursion, or None: they go step by step."""


@dataclass(frozen=True)
class TorchLayers(Layers):
    """Layers run by torch, operation by operation, on any device and in any dtype."""

    layers: tuple[DecoderLayer, ...]
    backend: str = "auto"  # of verify_attention

    def __len__(self) -> int:
        return len(self.layers)

    def new_cache(self, spec: CacheSpec) -> LayerCaches:
        return LayerCaches(tuple(layer.new_cache(spec) for layer in self.layers))

    def __call__(
        self,
        x: torch.Tensor,
        cache: Cache,
        forward: ForwardPass,
        attention_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert isinstance(cache, LayerCaches), "the cache that new_cache made"
        forward = replace(forward, backend=self.backend)
        for layer, layer_cache in zip(self.layers, cache.layers, strict=True):
            x, attention_input = layer(x, layer_cache, forward, attention_input), None
        return x

    def part(self, first: int, stop: int) -> TorchLayers:
        return replace(self, layers=self.layers[first:stop])


@dataclass(frozen=True)
class TorchExecution:
    """Execution of every operation by torch."""

    @property
    def packs(self) -> bool:
        return False

    def layers(self, layers: Iterable[DecoderLayer]) -> Layers:
        return TorchLayers(tuple(layers))

    def norm(self, norm: RmsNorm) -> RowStep:
        return norm

    def linear(self, linear: Linear) -> Projection:
        return linear

    def recursion(self, module: DraftModule) -> None:
        return None


@dataclass(frozen=True)
class Outputs:
    """Projection to the vocabulary, packed once for all heads that share it."""

    linear: Linear
    execution: Execution

    @cached_property
    def projected(self) -> Projection:
        """Projection of rows [T, d] that passed a norm."""
        return self.execution.linear(self.linear)


@dataclass(frozen=True)
class Head:
    """The last norm and the projection to the vocabulary; cap: what bounds logits on either side of
    0, without changing their order."""

    norm: RmsNorm
    outputs: Outputs
    cap: float | None = field(default=None, kw_only=True)

    @property
    def linear(self) -> Linear:
        """The projection as it was loaded."""
        return self.outputs.linear

    @property
    def execution(self) -> Execution:
        """Execution of the model's parts."""
        return self.outputs.execution

    @cached_property
    def normed(self) -> RowStep:
        """Norm of rows [T, d]."""
        return self.execution.norm(self.norm)

    @property
    def projected(self) -> Projection:
        """Projection of rows [T, d] that passed the norm."""
        return self.outputs.projected

    @property
    def token_ids(self) -> torch.Tensor:
        """Token of each of the projection's outputs, ascending."""
        return torch.arange(self.linear.weight.shape[0])

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """Return float32 logits [T, vocab] of rows that passed the norm."""
        logits = self.projected(normed).float()
        return logits if self.cap is None else (logits / self.cap).tanh() * self.cap

    def best(self, normed: torch.Tensor) -> torch.Tensor:
        """Return the best token [T] of rows that passed the norm, the first of equal ones."""
        return self.projected.best(normed)


@dataclass(frozen=True)
class DraftModule:
    """A module of one layer that drafts from hidden states and the tokens after them, and from its
    own output: an MTP module, or an EAGLE-3 draft."""

    embedding: Embedding
    embedding_norm: RmsNorm
    hidden_norm: RmsNorm
    layer: DecoderLayer
    head: Head

    @property
    def recycles_normed(self) -> bool:
        """True where the next draft is fed the output behind its norm."""
        raise NotImplementedError

    @property
    def inputs(self) -> ModuleInputs:
        """Both norms, and the projection of an MTP module, as they are run."""
        raise NotImplementedError

    @property
    def execution(self) -> Execution:
        """Execution of the module's parts."""
        return self.head.execution

    @cached_property
    def layers(self) -> Layers:
        """The layer, as it is run."""
        return self.execution.layers([self.layer])

    @cached_property
    def recursion(self) -> Recursion | None:
        """One call that drafts the best tokens by recursion, or None."""
        return self.execution.recursion(self)

    def make(self) -> object:
        """Make the parts that are otherwise made when they are first used: their files are read."""
        return self.layers, self.inputs, self.head.projected

    @property
    def attention(self) -> Attention:
        return self.layer.attention

    def new_cache(self, pages: PageAllocator) -> Cache:
        """Make a cache with room for all pages."""
        return self.layers.new_cache(pages.spec(self.embedding.dtype, self.embedding.device))

    def __call__(
        self,
        next_tokens: torch.Tensor,  # [T]
        hidden: torch.Tensor,  # [T, d]
        cache: Cache,
        layout: BatchLayout,
    ) -> torch.Tensor:
        """Run the layer over tokens and hidden states; returns [T, d] before the norm."""
        x, attention_input = self.joined(next_tokens, hidden, layout.positions)
        x = x.clone() if x is hidden else x  # the layer may overwrite it
        return self.layers(x, cache, ForwardPass(layout), attention_input)

    def joined(
        self, next_tokens: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Join the tokens [T] and hidden states [T, d] of positions [T]; returns the stream [T, d],
        and what attention is given [T, w] where the layer has no input norm."""
        return self.inputs.joined(self.embedding(next_tokens), hidden)

    def entering(
        self, next_tokens: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the layer's attention takes, and what its output is added to, [T, d]."""
        x, attention_input = self.joined(next_tokens, hidden, positions)
        return self.layer.normed(x) if attention_input is None else attention_input, x

    def leaving(self, residual: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Return the output [T, d] before the norm, given that of attention [T, d]."""
        return self.layer.fed_forward(self.layer.with_attended(residual, attended))

    def recycled(self, x: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        """Return the side of its norm on which the output is fed to the next draft."""
        return normed if self.recycles_normed else x
