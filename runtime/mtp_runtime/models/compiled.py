"""Execution by compiled kernels on a CPU: in float32, a row's bits independent of its batch.

Layers that the kernels do not know, by attention or feed-forward, are run by torch in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import cast

import torch

from mtp_checkpoints.errors import UnsupportedError
from mtp_kernels import decoder as kernels
from mtp_kernels.batch_layout import BatchLayout
from mtp_runtime.cache import Cache, CacheSpec, JoinedCaches
from mtp_runtime.layers.decoder_layer import DecoderLayer
from mtp_runtime.layers.embedding import EmbeddingTable
from mtp_runtime.layers.gqa import Gqa
from mtp_runtime.layers.linear import Linear
from mtp_runtime.layers.mla import Mla
from mtp_runtime.layers.moe import Mlp, Moe, SigmoidRouter
from mtp_runtime.layers.norm import RmsNorm
from mtp_runtime.layers.rope import Rope
from mtp_runtime.layers.tensor_parallel import ParallelMoe
from mtp_runtime.models.execution import Layers, Recursion, RecursiveModule, TorchLayers
from mtp_runtime.models.model import Model
from mtp_runtime.models.packing import KINDS, Rows, config_of, weights_of


@dataclass(frozen=True)
class StackedCache:
    """Caches of all layers in one tensor [layers, pages, page, slot]."""

    stacked: torch.Tensor

    @property
    def tensors(self) -> Iterable[torch.Tensor]:
        return self.stacked.unbind()


def stacked(cache: Cache) -> torch.Tensor:
    """Return the one tensor of a cache that compiled layers made."""
    assert isinstance(cache, StackedCache), "the cache that new_cache made"
    return cache.stacked


def new_stacked_cache(layers: int, config: kernels.DecoderConfig, spec: CacheSpec) -> StackedCache:
    """Return the cache of a number of layers; its tensor is uninitialized."""
    shape = layers, spec.pages, spec.page_size, config.attention.slot
    return StackedCache(torch.empty(shape, dtype=spec.dtype, device=spec.device))


class CompiledLayers:
    """A compiled decoder with the interface of Layers."""

    def __init__(self, decoder: kernels.Decoder) -> None:
        self.decoder = decoder

    def __len__(self) -> int:
        return len(self.decoder)

    def new_cache(self, spec: CacheSpec) -> StackedCache:
        return new_stacked_cache(len(self), self.decoder.config, spec)

    def __call__(
        self,
        x: torch.Tensor,
        cache: Cache,
        layout: BatchLayout,
        attention_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self.decoder(x, layout, stacked(cache), attention_input)
        return x

    def each(self) -> Iterator[Layers]:
        return (self.part(at, at + 1) for at in range(len(self)))

    def part(self, first: int, stop: int) -> CompiledLayers:
        return CompiledLayers(self.decoder.part(first, stop))


@dataclass(frozen=True)
class MixedLayers:
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
        layout: BatchLayout,
        attention_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert isinstance(cache, JoinedCaches), "the cache that new_cache made"
        for run, own in zip(self.runs, cache.parts, strict=True):
            x, attention_input = run(x, own, layout, attention_input), None
        return x

    def each(self) -> Iterator[Layers]:
        return (layer for run in self.runs for layer in run.each())

    def part(self, first: int, stop: int) -> MixedLayers:
        starts = accumulate(map(len, self.runs), initial=0)
        spans = [
            (run, max(first - start, 0), min(stop - start, len(run)))
            for run, start in zip(self.runs, starts, strict=False)
        ]
        return MixedLayers(tuple(run.part(low, high) for run, low, high in spans if low < high))


@dataclass(frozen=True)
class CompiledRecursion:
    """A compiled recursion with the interface of Recursion."""

    recursion: kernels.Recursion

    def __call__(
        self,
        x: torch.Tensor,
        starts: Sequence[int],
        counts: Sequence[int],
        page_table: torch.Tensor,
        cache: Cache,
    ) -> list[list[int]]:
        return self.recursion(
            x, starts=starts, counts=counts, page_table=page_table, kv_cache=stacked(cache)
        )


@dataclass(frozen=True)
class CompiledExecution:
    """Packs parts for the kernels; the parts themselves may then be dropped."""

    backend: kernels.Backend

    @property
    def packs(self) -> bool:
        return True

    def layers(self, layers: Iterable[DecoderLayer]) -> Layers:
        """Pack the layers one by one, so that no two copies of a model are held."""
        runs: list[TorchRun | PackedRun] = []
        for layer in layers:
            kind = PackedRun if self.backend.runs(kind_of(layer)) else TorchRun
            if not runs or not isinstance(runs[-1], kind) or not runs[-1].takes(layer):
                runs.append(self.packed_run() if kind is PackedRun else TorchRun())
            runs[-1].add(layer)
        joined = tuple(run.layers() for run in runs)
        return joined[0] if len(joined) == 1 else MixedLayers(joined)

    def packed_run(self) -> PackedRun:
        """Return an empty run of layers for the kernels."""
        return PackedRun(self.backend)

    def norm(self, norm: RmsNorm) -> kernels.RowStep:
        return self.backend.norm(norm.weight, norm.eps)

    def linear(self, linear: Linear) -> kernels.Projection:
        return self.backend.projection(Rows.of(linear))

    def recursion(self, module: RecursiveModule) -> Recursion | None:
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
        return CompiledRecursion(self.backend.recursion(parts))


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
                expected=f"attention {KINDS[Mla]} or {KINDS[Gqa]}, feed-forward {KINDS[Mlp]} or"
                f" {KINDS[SigmoidRouter]}",
                found=f"attention {kind.attention}, feed-forward {kind.feed_forward}",
                todo="Load the model without deterministic",
            )


def kind_of(layer: DecoderLayer) -> kernels.LayerKind:
    """Return the kind of a layer; a part without a name is kept as it is, and no kernel runs it."""
    feed_forward = layer.feed_forward
    sparse = feed_forward if isinstance(feed_forward, Moe | ParallelMoe) else None
    deciding = feed_forward if sparse is None else sparse.router
    types = type(layer.attention), type(deciding)
    return kernels.LayerKind(*(KINDS.get(part, part.__name__) for part in types))


@dataclass
class TorchRun:
    """Consecutive layers for torch."""

    kept: list[DecoderLayer] = field(default_factory=list)

    def takes(self, layer: DecoderLayer) -> bool:
        """Return True: layers of any kind follow each other."""
        return True

    def add(self, layer: DecoderLayer) -> None:
        self.kept.append(layer)

    def layers(self) -> Layers:
        return TorchLayers(tuple(self.kept))


@dataclass
class PackedRun:
    """Consecutive layers for the kernels, which share one DecoderConfig and one Rope."""

    backend: kernels.Backend
    packed: list[kernels.PackedLayer] = field(default_factory=list)
    shared_config: kernels.DecoderConfig | None = None
    rope: Rope | None = None
    router: SigmoidRouter | None = None

    def takes(self, layer: DecoderLayer) -> bool:
        """Return True for a layer with the sizes and rotations of those before it."""
        attention = layer.attention
        assert isinstance(attention, Mla | Gqa), "the kinds that the kernels run"
        config = self.shared_config, self.rope
        return config in ((None, None), (config_of(layer, attention), attention.rope))

    def add(self, layer: DecoderLayer) -> None:
        """Pack a layer."""
        self.packed.append(self.backend.pack(weights_of(layer, self.noted(layer))))

    def noted(self, layer: DecoderLayer) -> Mla | Gqa:
        """Note what the layers share; return the layer's attention."""
        attention, feed_forward = layer.attention, layer.feed_forward
        assert isinstance(attention, Mla | Gqa), "the kinds that the kernels run"
        self.shared_config, self.rope = config_of(layer, attention), attention.rope
        if isinstance(feed_forward, Moe | ParallelMoe):
            self.router = cast(SigmoidRouter, feed_forward.router)
        return attention

    @property
    def config(self) -> kernels.DecoderConfig:
        """Sizes and constants that the layers share."""
        assert self.shared_config is not None, "a run has layers"
        if self.router is None:
            return self.shared_config
        return replace(self.shared_config, routing=self.router.routing)

    def layers(self) -> Layers:
        """Join the layers."""
        assert self.rope is not None, "a run has layers"
        return CompiledLayers(self.backend.decoder(self.config, self.packed, self.rope))
