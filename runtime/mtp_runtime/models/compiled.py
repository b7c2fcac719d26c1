"""Execution by compiled kernels on a CPU: in float32, a row's bits independent of its batch.

Layers that the kernels do not know, by attention or feed-forward, are run by torch in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mtp_checkpoints.errors import UnsupportedError
from mtp_kernels import decoder as kernels
from mtp_kernels.gated_delta import DeltaState
from mtp_runtime.cache import Cache, CacheSpec, JoinedCaches
from mtp_runtime.layers.attention import ForwardPass
from mtp_runtime.layers.decoder_layer import DecoderLayer, FeedForward, PostNormLayer
from mtp_runtime.layers.embedding import EmbeddingTable
from mtp_runtime.layers.gated_delta_net import GatedDeltaNet, clear_new
from mtp_runtime.layers.gqa import Gqa
from mtp_runtime.layers.linear import Linear
from mtp_runtime.layers.mla import Mla
from mtp_runtime.layers.moe import Mlp, Moe, SigmoidRouter, SoftmaxRouter
from mtp_runtime.layers.norm import RmsNorm
from mtp_runtime.layers.tensor_parallel import ParallelMoe
from mtp_runtime.models.execution import DraftModule, Layers, TorchLayers
from mtp_runtime.models.model import Model
from mtp_runtime.models.packing import (
    KINDS,
    Rows,
    Shared,
    experts_of,
    shared_by,
    weights_of,
)

if TYPE_CHECKING:
    from mtp_kernels.decoder.compiled_cpu.sharded import ShardedDecoder


@dataclass(frozen=True)
class StackedCache:
    """Caches of all layers in one tensor [layers, pages, page, slot]."""

    stacked: torch.Tensor

    @property
    def tensors(self) -> Iterable[torch.Tensor]:
        return self.stacked.unbind()

    @property
    def blocks(self) -> Iterable[torch.Tensor]:
        return (self.stacked,)

    @property
    def states(self) -> Iterable[torch.Tensor]:
        return ()


def stacked(cache: Cache) -> torch.Tensor:
    """Return the one tensor of a cache that compiled layers made."""
    assert isinstance(cache, StackedCache), "the cache that new_cache made"
    return cache.stacked


@dataclass(frozen=True)
class PackedLayers(Layers):
    """Layers that kernels run, whose cache is one tensor."""

    decoder: kernels.Decoder | ShardedDecoder

    def __len__(self) -> int:
        return len(self.decoder)

    def new_cache(self, spec: CacheSpec) -> StackedCache:
        shape = len(self), spec.pages, spec.page_size, self.decoder.config.attention.slot
        return StackedCache(torch.empty(shape, dtype=spec.dtype, device=spec.device))


@dataclass(frozen=True)
class CompiledLayers(PackedLayers):
    """A compiled decoder with the interface of Layers."""

    decoder: kernels.Decoder

    def __call__(
        self,
        x: torch.Tensor,
        cache: Cache,
        forward: ForwardPass,
        attention_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self.decoder(x, forward.layout, stacked(cache), attention_input)
        return x

    def part(self, first: int, stop: int) -> CompiledLayers:
        return CompiledLayers(self.decoder.part(first, stop))


@dataclass(frozen=True)
class StackedStates:
    """States of layers with gated delta nets: tensors [layers, ...], each layer's as in a
    DeltaState."""

    stacked: DeltaState

    @property
    def tensors(self) -> Iterable[torch.Tensor]:
        return ()

    @property
    def blocks(self) -> Iterable[torch.Tensor]:
        return ()

    @property
    def states(self) -> Iterable[torch.Tensor]:
        return (tensor for layer in self.each() for tensor in layer)

    def each(self) -> list[DeltaState]:
        """Return the states of each layer."""
        return [DeltaState(*tensors) for tensors in zip(*self.stacked, strict=True)]


@dataclass(frozen=True)
class DeltaLayers(Layers):
    """A compiled decoder of layers with gated delta nets with the interface of Layers."""

    decoder: kernels.DeltaDecoder

    def __len__(self) -> int:
        return len(self.decoder)

    def new_cache(self, spec: CacheSpec) -> StackedStates:
        sizes = self.decoder.config.attention
        one = DeltaState.empty(spec.states, spec.drafts, sizes, spec.dtype, spec.device)
        tensors = (tensor.new_empty(len(self), *tensor.shape) for tensor in one)
        return StackedStates(DeltaState(*tensors))

    def __call__(
        self,
        x: torch.Tensor,
        cache: Cache,
        forward: ForwardPass,
        attention_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert isinstance(cache, StackedStates), "the cache that new_cache made"
        assert forward.layout.states is not None, "a layout of sequences with states"
        clear_new(cache.each(), forward.layout)
        self.decoder(x, forward.layout.states, cache.stacked)
        return x

    def part(self, first: int, stop: int) -> DeltaLayers:
        return DeltaLayers(self.decoder.part(first, stop))


@dataclass(frozen=True)
class MixedLayers(Layers):
    """Runs of layers in sequence, each with its own execution."""

    runs: tuple[Layers, ...]

    def __len__(self) -> int:
        return sum(map(len, self.runs))

    def new_cache(self, spec: CacheSpec) -> JoinedCaches:
        return JoinedCaches(tuple(run.new_cache(spec) for run in self.runs))

    def __call__(
        self,
        x: torch.Tensor,
        cache: Cache,
        forward: ForwardPass,
        attention_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert isinstance(cache, JoinedCaches), "the cache that new_cache made"
        for run, run_cache in zip(self.runs, cache.parts, strict=True):
            x, attention_input = run(x, run_cache, forward, attention_input), None
        return x

    def part(self, first: int, stop: int) -> Layers:
        starts = accumulate(map(len, self.runs), initial=0)
        spans = [
            (run, max(first - start, 0), min(stop - start, len(run)))
            for run, start in zip(self.runs, starts, strict=False)
        ]
        return joined([run.part(low, high) for run, low, high in spans if low < high])


def joined(runs: Sequence[Layers]) -> Layers:
    """Return runs of layers as one."""
    return runs[0] if len(runs) == 1 else MixedLayers(tuple(runs))


@dataclass(frozen=True)
class CompiledExecution:
    """Packs parts for the kernels; the parts themselves may then be dropped."""

    backend: kernels.Backend

    @property
    def packs(self) -> bool:
        return True

    def layers(self, layers: Iterable[DecoderLayer]) -> Layers:
        """Pack the layers one by one, so that no two copies of a model are held."""
        alike = groupby(layers, self._shared)
        return joined([self._run(shared, run) for shared, run in alike])

    def _shared(self, layer: DecoderLayer) -> Shared | None:
        """Return what the layers of a run share; None for a layer that torch runs."""
        return shared_by(layer) if self.backend.runs(kind_of(layer)) else None

    def _run(self, shared: Shared | None, layers: Iterable[DecoderLayer]) -> Layers:
        """Make consecutive layers that share what decoders are made with."""
        return TorchLayers(tuple(layers)) if shared is None else self.packed(shared, layers)

    def packed(self, shared: Shared, layers: Iterable[DecoderLayer]) -> Layers:
        """Pack consecutive layers for the kernels."""
        parts = []
        for layer in layers:
            parts.append(self.backend.pack(weights_of(layer, experts_of(layer.feed_forward))))
            shared = shared.with_routing_of(layer)
        if isinstance(shared.config, kernels.DeltaConfig):
            return DeltaLayers(self.backend.delta_decoder(shared.config, parts))
        config, rope = shared.of_attention
        return CompiledLayers(self.backend.decoder(config, parts, rope))

    def norm(self, norm: RmsNorm) -> kernels.RowStep:
        return self.backend.norm(norm.weight, norm.eps)

    def linear(self, linear: Linear) -> kernels.Projection:
        return self.backend.projection(Rows.of(linear))

    def recursion(self, module: DraftModule) -> kernels.Recursion | None:
        """Join the module's parts, or return None where torch runs its layer."""
        layers = module.layers
        if not isinstance(layers, CompiledLayers):
            return None
        assert isinstance(module.embedding, EmbeddingTable), "compiled models are held in memory"
        parts = kernels.RecursionParts(
            decoder=layers.decoder,
            embedding=module.embedding.weight,
            inputs=module.inputs,
            head_norm=module.head.normed,
            head=module.head.projected,
            tokens=module.head.token_ids,
            recycles_normed=module.recycles_normed,
        )
        return self.backend.recursion(parts)


def refuse_matrix_units() -> None:
    """Raise UnsupportedError where activations of bf16 go through matrix units in some batches."""
    from mtp_kernels.cpu import matrix_units  # which needs numba

    if matrix_units.HAS_TILES:
        raise UnsupportedError(
            "Activations of bfloat16 are not deterministic on this CPU",
            expected="activations float32 or int8, or a CPU without matrix units (AMX)",
            found="matrix units, which multiply 16 rows and more in another order",
            todo="Load the model without deterministic, or with other activations",
        )


def refuse_torch_layers(model: Model, folder: Path) -> None:
    """Raise UnsupportedError if torch runs a layer of the model that was loaded from a folder."""
    parts = (model.layers, *(module.layers for module in model.mtp_modules))
    layers = (layer for part in parts for layer in part.each())
    for index, layer in enumerate(layers):
        if isinstance(layer, TorchLayers):
            kind = kind_of(layer.layers[0])
            raise UnsupportedError(
                "Only the compiled kernels are deterministic, and they do not run this layer",
                where=f"layer {index} of {folder}",
                expected=f"attention {_either(Mla, Gqa, GatedDeltaNet)}, feed-forward"
                f" {_either(Mlp, SigmoidRouter, SoftmaxRouter)}",
                found=f"attention {kind.attention}, feed-forward {kind.feed_forward}",
                todo="Load the model without deterministic",
            )


def _either(*parts: type) -> str:
    *names, last = (KINDS[part] for part in parts)
    return f"{', '.join(names)} or {last}"


def kind_of(layer: DecoderLayer) -> kernels.LayerKind:
    """Return the kind of a layer; a part without a name is kept as it is, and no kernel runs it."""
    attention, feed_forward = layer.attention, layer.feed_forward
    sparse = feed_forward if isinstance(feed_forward, Moe | ParallelMoe) else None
    deciding = feed_forward if sparse is None else sparse.router
    kinds = [KINDS.get(type(part), type(part).__name__) for part in (attention, deciding)]
    if isinstance(attention, GatedDeltaNet) and not attention.sizes.has_whole_vectors:
        kinds[0] = f"{kinds[0]} with keys of {attention.sizes.key}"
    if isinstance(layer, PostNormLayer):
        kinds[0] = f"{kinds[0]} with norms after its parts"
    mlps = tuple(_mlps(feed_forward))
    if len({tuple(mlp.down.weight.shape) for mlp in mlps}) > 1:
        kinds[1] = f"{kinds[1]} with shared experts of another width"
    if any(mlp.limit is not None for mlp in mlps):
        kinds[1] = f"{kinds[1]} with limits of inner values"
    if not all(mlp.is_gated for mlp in mlps):
        kinds[1] = f"{kinds[1]} without gates"
    return kernels.LayerKind(*kinds)


def _mlps(feed_forward: FeedForward) -> Iterable[Mlp]:
    """Return an MLP of each kind: of experts the first routed one, and the shared ones."""
    if isinstance(feed_forward, Mlp):
        return (feed_forward,)
    if not isinstance(feed_forward, Moe):
        return ()
    return feed_forward.experts.each(
        (0, *range(feed_forward.routed_experts, len(feed_forward.experts)))
    )
