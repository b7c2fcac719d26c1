"""Layers of which every rank has a part, by compiled kernels: stage by stage, and between them the
ranks join what they computed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, cast

import torch

from mtp_kernels import decoder as kernels
from mtp_runtime.cache import Cache
from mtp_runtime.layers.attention import ForwardPass
from mtp_runtime.layers.decoder_layer import DecoderLayer, FeedForward
from mtp_runtime.layers.linear import Linear
from mtp_runtime.layers.moe import Mlp
from mtp_runtime.layers.tensor_parallel import (
    ColumnParallelLinear,
    ParallelMoe,
    RowParallelLinear,
    TensorParallel,
)
from mtp_runtime.models.compiled import CompiledExecution, PackedLayers, stacked
from mtp_runtime.models.execution import Layers
from mtp_runtime.models.packing import Rows, Shared, attention_of, experts_of, weights_of
from mtp_runtime.parallel.group import Part

if TYPE_CHECKING:
    from mtp_kernels.decoder.compiled_cpu import Backend
    from mtp_kernels.decoder.compiled_cpu.sharded import ShardedDecoder, ShardedPass

Sizes = tuple[tuple[int, ...], tuple[int, ...]]  # inputs and outputs of a matrix, of every rank


@dataclass(frozen=True)
class LayerSizes:
    """Parts of every rank in one layer: of the output projection, of each shared expert, and the
    numbers of routed experts, none in a dense layer."""

    output: Sizes
    shared: tuple[Sizes, ...]
    routed: tuple[range, ...]


@dataclass(frozen=True)
class ShardedExecution(CompiledExecution):
    """Packs the own parts of layers; what is not split is packed as by CompiledExecution."""

    parallel: TensorParallel = field(kw_only=True)

    def linear(self, linear: Linear) -> kernels.Projection:
        local = super().linear(linear)
        return linear.run_by(local) if isinstance(linear, ColumnParallelLinear) else local

    def packed(self, shared: Shared, layers: Iterable[DecoderLayer]) -> Layers:
        backend = cast("Backend", self.backend)
        parts, sizes = [], []
        for layer in layers:
            routed, whole = split_experts(layer.feed_forward)
            mlps = tuple((Rows.stacked([mlp.gate_up]), Rows.of(mlp.down)) for mlp in whole)
            parts.append(backend.pack_shard(kernels.LayerShard(weights_of(layer, routed), mlps)))
            sizes.append(_sizes_of(layer, whole))
            shared = shared.with_routing_of(layer)
        config, rope = shared.of_attention
        decoder = backend.sharded_decoder(config, parts, rope)
        return ShardedLayers(decoder, tuple(sizes), self.parallel)


@dataclass(frozen=True)
class ShardedLayers(PackedLayers):
    """Compiled parts of layers with the interface of Layers."""

    decoder: ShardedDecoder
    sizes: tuple[LayerSizes, ...]
    parallel: TensorParallel

    def part(self, first: int, stop: int) -> ShardedLayers:
        return replace(self, decoder=self.decoder.part(first, stop), sizes=self.sizes[first:stop])

    def __call__(
        self,
        x: torch.Tensor,
        cache: Cache,
        forward: ForwardPass,
        attention_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        run = self.decoder.begin(x, forward.layout, stacked(cache), attention_input)
        feed_forward = self._reduced if self.parallel.reduces else self._gathered
        for layer, sizes in enumerate(self.sizes):
            project = partial(run.output, layer)
            x += self.parallel.product(project, run.attended(layer), sizes.output)
            feed_forward(run, layer, x)
        return x

    def _gathered(self, run: ShardedPass, layer: int, x: torch.Tensor) -> None:
        """Add the experts' outputs to x in the order of one process."""
        group, sizes, picked = self.parallel.group, self.sizes[layer], run.picked(layer)
        parts = [
            Part(run.shared_inner(layer, number), inputs, 1)
            for number, (inputs, _) in enumerate(sizes.shared)
        ]
        if picked is None:
            inner = group.several(parts)
        else:
            pairs = _Sorted.of(picked, sizes.routed)
            routed = run.experts(layer, pairs.of_rank(group.rank))
            routed, *inner = group.several([Part(routed, pairs.counts, 0), *parts])
            run.add(x, pairs.all, routed)
        for number, values in enumerate(inner):
            _, outputs = sizes.shared[number]
            x += group.columns(run.shared_down(layer, number, values), outputs)

    def _reduced(self, run: ShardedPass, layer: int, x: torch.Tensor) -> None:
        """Add the sum of the ranks' experts to x."""
        sizes, picked = self.sizes[layer], run.picked(layer)
        total = torch.zeros_like(x)
        if picked is not None:
            local = _Sorted.of(picked, sizes.routed).of_rank(self.parallel.group.rank)
            run.add(total, local, run.experts(layer, local))
        for number in range(len(sizes.shared)):
            inner = run.shared_inner(layer, number)
            total += run.shared_down(layer, number, inner)
        x += self.parallel.group.sum(total)


@dataclass(frozen=True)
class _Sorted:
    """All pairs of a row and an expert that it picked, in order of experts."""

    all: kernels.Pairs
    parts: tuple[range, ...]

    @classmethod
    def of(cls, picked: torch.Tensor, parts: tuple[range, ...]) -> _Sorted:
        flat = picked.flatten()
        places = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=parts[-1].stop)
        ends = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        return cls(kernels.Pairs(places // picked.shape[1], places, ends), parts)

    @property
    def counts(self) -> list[int]:
        """Number of pairs of every rank's experts."""
        return [int(self.all.ends[part.stop] - self.all.ends[part.start]) for part in self.parts]

    def of_rank(self, rank: int) -> kernels.Pairs:
        """Return the pairs of a rank's experts."""
        part = self.parts[rank]
        ends = self.all.ends[part.start : part.stop + 1]
        local = slice(int(ends[0]), int(ends[-1]))
        return kernels.Pairs(self.all.rows[local], self.all.places[local], ends - ends[0])


def split_experts(feed_forward: FeedForward) -> tuple[Sequence[Mlp], Sequence[Mlp]]:
    """Return the local routed experts and the shared ones; a dense MLP is a shared one."""
    if not isinstance(feed_forward, ParallelMoe):
        return (), experts_of(feed_forward)
    every, local = tuple(feed_forward.experts.every()), len(feed_forward.own)
    return every[:local], every[local:]


def _sizes_of(layer: DecoderLayer, shared: Sequence[Mlp]) -> LayerSizes:
    feed_forward = layer.feed_forward
    return LayerSizes(
        output=_joined(attention_of(layer).output),
        shared=tuple(_joined(mlp.down) for mlp in shared),
        routed=feed_forward.parts if isinstance(feed_forward, ParallelMoe) else (),
    )


def _joined(linear: object) -> Sizes:
    """Return the parts of a matrix; one whose product is a summand is joined by its layer."""
    return (linear.inputs, linear.outputs) if isinstance(linear, RowParallelLinear) else ((), ())
