"""Execution by compiled kernels: float32 on a CPU, a row's bits independent of its batch.

Layers that the kernels do not know, by attention or feed-forward, are run by torch in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import torch

from mtp_kernels import decoder as kernels
from mtp_kernels.batch_layout import BatchLayout
from mtp_runtime.cache import Cache, CacheSpec, JoinedCaches
from mtp_runtime.config import Hidden
from mtp_runtime.layers.decoder_layer import DecoderLayer
from mtp_runtime.layers.linear import Linear
from mtp_runtime.layers.mla import Mla
from mtp_runtime.layers.moe import Mlp, Moe, SigmoidRouter
from mtp_runtime.layers.norm import RmsNorm
from mtp_runtime.layers.rope import Rope
from mtp_runtime.models.model import Layers, MtpModule, Recursion, TorchLayers


@dataclass(frozen=True)
class StackedCache:
    """Latents and rope keys of all layers in one tensor [layers, pages, page, c+r]."""

    stacked: torch.Tensor

    @property
    def tensors(self) -> Iterable[torch.Tensor]:
        return self.stacked.unbind()


def stacked(cache: Cache) -> torch.Tensor:
    """Return the one tensor of a cache that compiled layers made."""
    assert isinstance(cache, StackedCache), "the cache that new_cache made"
    return cache.stacked


class CompiledLayers:
    """A compiled decoder with the interface of Layers."""

    def __init__(self, decoder: kernels.Decoder) -> None:
        self.decoder = decoder

    def __len__(self) -> int:
        return len(self.decoder)

    def new_cache(self, spec: CacheSpec) -> StackedCache:
        sizes = self.decoder.sizes
        shape = len(self), spec.pages, spec.page_size, sizes.latent + sizes.rope
        return StackedCache(torch.empty(shape, dtype=spec.dtype, device=spec.device))

    def __call__(self, x: torch.Tensor, cache: Cache, layout: BatchLayout) -> torch.Tensor:
        self.decoder(x, layout, stacked(cache))
        return x

    def each(self) -> Iterator[Layers]:
        return (CompiledLayers(decoder) for decoder in self.decoder.each())


@dataclass(frozen=True)
class MixedLayers:
    """Runs of layers, each with an execution of its own, one behind the other."""

    runs: tuple[Layers, ...]

    def __len__(self) -> int:
        return sum(map(len, self.runs))

    def new_cache(self, spec: CacheSpec) -> JoinedCaches:
        return JoinedCaches(tuple(run.new_cache(spec) for run in self.runs))

    def __call__(self, x: torch.Tensor, cache: Cache, layout: BatchLayout) -> torch.Tensor:
        assert isinstance(cache, JoinedCaches), "the cache that new_cache made"
        for run, own in zip(self.runs, cache.parts, strict=True):
            x = run(x, own, layout)
        return x

    def each(self) -> Iterator[Layers]:
        return (layer for run in self.runs for layer in run.each())


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
        return self.recursion(x, starts, counts, page_table, stacked(cache))


@dataclass(frozen=True)
class CompiledExecution:
    """Packs parts for the kernels; the parts themselves may then be dropped."""

    arena: kernels.Arena = field(default_factory=kernels.Arena)

    def layers(self, layers: Iterable[DecoderLayer]) -> Layers:
        """Pack the layers one by one, so that no two copies of a model are held."""
        runs: list[_TorchRun | _PackedRun] = []
        for layer in layers:
            kind = _PackedRun if is_known(layer) else _TorchRun
            if not runs or not isinstance(runs[-1], kind):
                runs.append(kind())
            runs[-1].add(layer, self.arena)
        joined = tuple(run.layers() for run in runs)
        return joined[0] if len(joined) == 1 else MixedLayers(joined)

    def norm(self, norm: RmsNorm) -> kernels.Norm:
        return kernels.Norm(norm.weight, norm.eps)

    def linear(self, linear: Linear) -> kernels.Projection:
        return kernels.Projection(_dense(linear), self.arena)

    def recursion(self, module: MtpModule) -> Recursion | None:
        """Join the module's parts, or return None where torch runs its layer."""
        layers = module.layers
        if not isinstance(layers, CompiledLayers):
            return None
        *norms, projection = module.inputs
        norms.append(module.head.normed)
        head = module.head.projected
        assert isinstance(projection, kernels.Projection) and isinstance(head, kernels.Projection)
        assert all(isinstance(norm, kernels.Norm) for norm in norms)
        return CompiledRecursion(
            kernels.Recursion(
                layers.decoder,
                module.embedding,
                cast(tuple[kernels.Norm, kernels.Norm, kernels.Norm], tuple(norms)),
                projection,
                head,
                module.contract.recycled_hidden is Hidden.AFTER_NORM,
            )
        )


def is_known(layer: DecoderLayer) -> bool:
    """Whether the kernels compute a layer of this attention and this feed-forward."""
    feed_forward = layer.feed_forward
    return isinstance(layer.attention, Mla) and (
        isinstance(feed_forward, Mlp)
        or (isinstance(feed_forward, Moe) and isinstance(feed_forward.router, SigmoidRouter))
    )


@dataclass
class _TorchRun:
    """Consecutive layers for torch."""

    kept: list[DecoderLayer] = field(default_factory=list)

    def add(self, layer: DecoderLayer, arena: kernels.Arena) -> None:
        self.kept.append(layer)

    def layers(self) -> Layers:
        return TorchLayers(tuple(self.kept))


@dataclass
class _PackedRun:
    """Consecutive layers for the kernels, which share one Sizes and one Rope."""

    packed: list[kernels.PackedLayer] = field(default_factory=list)
    sizes: kernels.Sizes | None = None
    rope: Rope | None = None
    router: SigmoidRouter | None = None

    def add(self, layer: DecoderLayer, arena: kernels.Arena) -> None:
        attention, feed_forward = layer.attention, layer.feed_forward
        assert isinstance(attention, Mla)
        sizes = sizes_of(attention, layer.input_norm.eps)
        assert self.sizes in (None, sizes), "all layers of a model share their sizes"
        self.sizes, self.rope = sizes, attention.rope
        if isinstance(feed_forward, Moe):
            self.router = cast(SigmoidRouter, feed_forward.router)
        self.packed.append(packed(layer, attention, arena))

    def layers(self) -> Layers:
        assert self.sizes is not None and self.rope is not None, "a run has layers"
        sizes = self.sizes if self.router is None else with_router(self.sizes, self.router)
        rope = self.rope
        return CompiledLayers(
            kernels.Decoder(sizes, self.packed, rope.inv_freq, rope.attention_scaling)
        )


def sizes_of(attention: Mla, eps: float) -> kernels.Sizes:
    """Return the sizes that a model's layers share, those of a router being neutral."""
    heads, nope, latent = attention.key_up.shape
    query_up = attention.query_up
    return kernels.Sizes(
        hidden=attention.output.weight.shape[0],
        heads=heads,
        nope=nope,
        rope=attention.rope_size,
        value=attention.value_up.shape[2],
        latent=latent,
        query_rank=0 if query_up is None else query_up.weight.shape[1],
        experts_per_token=1,
        groups=1,
        groups_per_token=1,
        normalise=False,
        routed_scale=np.float32(1.0),
        norm_eps=np.float32(eps),
        attention_scale=np.float32(attention.scale),
    )


def with_router(sizes: kernels.Sizes, router: SigmoidRouter) -> kernels.Sizes:
    """Return the sizes with those of a router."""
    return sizes._replace(
        experts_per_token=router.experts_per_token,
        groups=router.groups,
        groups_per_token=router.groups_per_token,
        normalise=router.normalise,
        routed_scale=np.float32(router.scale.item()),
    )


def packed(layer: DecoderLayer, attention: Mla, arena: kernels.Arena) -> kernels.PackedLayer:
    """Pack a layer's weights in the kernels' layout; the layer itself may then be dropped."""
    feed_forward, heads = layer.feed_forward, len(attention.key_up)
    router: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    if isinstance(feed_forward, Moe):
        gate_up = torch.stack([_dense(linear) for linear in feed_forward.gate_up])
        down = torch.stack([_dense(linear) for linear in feed_forward.down])
        own = cast(SigmoidRouter, feed_forward.router)
        router, bias = own.weight.t(), own.bias
    else:
        assert isinstance(feed_forward, Mlp)
        gate_up, down = _dense(feed_forward.gate_up)[None], _dense(feed_forward.down)[None]
    gate, up = gate_up.chunk(2, dim=1)
    query_up = None if attention.query_up is None else _dense(attention.query_up).contiguous()
    return kernels.pack_layer(
        kernels.LayerWeights(
            input_norm=layer.input_norm.weight,
            down=_dense(attention.down),
            query_norm=None if attention.query_norm is None else attention.query_norm.weight,
            query_up=None if query_up is None else query_up.view(heads, -1, query_up.shape[1]),
            latent_norm=attention.latent_norm.weight,
            key_up=attention.key_up.transpose(1, 2),
            value_up=attention.value_up.transpose(1, 2),
            output=_dense(attention.output),
            post_norm=layer.post_norm.weight,
            router=router,
            router_bias=bias,
            gate=gate,
            up=up,
            expert_down=down,
        ),
        arena,
    )


def _dense(linear: Linear) -> torch.Tensor:
    return linear.matrix(torch.float32).t()
