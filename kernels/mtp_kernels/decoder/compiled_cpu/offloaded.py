"""Layers whose routed experts are read when rows pick them: each is run in two steps, and between
them it is known which experts are needed.

They are the steps of a whole pass, and a row's experts are added in order of their numbers, so that
every number has the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from mtp_kernels.batch_layout import BatchLayout, StateLayout
from mtp_kernels.cpu.delta_rule import Pool
from mtp_kernels.cpu.jit import compiled
from mtp_kernels.cpu.team import process_team, wait
from mtp_kernels.cpu.vectors import borrowed
from mtp_kernels.decoder import DecoderConfig, DeltaConfig, OffloadedLayer, Rope
from mtp_kernels.decoder.checks import check_delta_pass, check_layers, check_pass
from mtp_kernels.decoder.compiled_cpu.attention import Scratch, attention
from mtp_kernels.decoder.compiled_cpu.delta import (
    DeltaDecoder,
    NetScratch,
    NetSizes,
    delta_net,
)
from mtp_kernels.decoder.compiled_cpu.expert_cache import CachedExperts, ExpertCache, Reading
from mtp_kernels.decoder.compiled_cpu.experts import add_experts, make_inner, route
from mtp_kernels.decoder.compiled_cpu.packing import Packer
from mtp_kernels.decoder.compiled_cpu.scratch import make_scratch, planned
from mtp_kernels.decoder.compiled_cpu.weights import (
    PackedLayer,
    PackedLayers,
    Sizes,
    inner_sizes,
    pack_layer,
)
from mtp_kernels.gated_delta.compiled_cpu import spans_of
from mtp_kernels.gated_delta.state import DeltaState


@dataclass(frozen=True)
class PackedOffloaded:
    """A layer's record, and its routed experts where they are in a cache; else all are packed."""

    layer: PackedLayer
    experts: CachedExperts | None = None


class Pairs(NamedTuple):
    """Rows and experts in order of experts, as sort_by_expert returns them."""

    rows: Any  # [p]
    places: Any  # [p] among all picks, -1 of a shared expert's
    ends: Any  # [e + shared + 1]


def pack_offloaded(part: OffloadedLayer, packer: Packer, cache: ExpertCache) -> PackedOffloaded:
    """Pack a layer but for its routed experts, which the cache takes in."""
    number = part.experts.number
    layer = pack_layer(part.weights, packer, absent=number)
    gate_up, down = layer.arrays[-2:]  # the stacks' tables
    return PackedOffloaded(layer, cache.add(part.experts, gate_up[:number], down[:number]))


class OffloadedDecoder(PackedLayers[PackedOffloaded]):
    """Some packed layers of a model, some of which have their routed experts in a cache."""

    def __init__(
        self,
        config: DecoderConfig,
        layers: Sequence[PackedOffloaded],
        rope: Rope,
        cache: ExpertCache,
    ) -> None:
        super().__init__(config, layers, rope)
        self._packed, self.cache = [one.layer for one in layers], cache
        check_layers(config, self._packed)
        self._runs = ExpertRuns(self.sizes, cache)
        self._experts, self._inner = inner_sizes(self._packed, config.routing.experts_per_token)

    def part(self, first: int, stop: int) -> OffloadedDecoder:
        """Return layers [first, stop) as a decoder of their own, with the same cache."""
        return OffloadedDecoder(self.config, self.layers[first:stop], self._rope, self.cache)

    def __call__(
        self,
        x: torch.Tensor,
        layout: BatchLayout,
        kv_cache: torch.Tensor,
        attention_input: torch.Tensor | None = None,
    ) -> None:
        """Run the stream x [T, d] through the layers, in place. Raises what reading an expert
        raises."""
        check_pass(
            self.config,
            self._packed,
            x=x,
            layout=layout,
            kv_cache=kv_cache,
            attention_input=attention_input,
        )
        batch, parts = planned(layout, kv_cache.shape[2], self.rotation, self.sizes.heads)
        scratch = self._scratch(len(x), parts, attention_input)
        caches, rows = kv_cache.flatten(1, 2).numpy(), x.numpy()
        with self.cache.passing:
            for one, own in zip(self.layers, caches, strict=False):
                record = one.layer.record
                work = len(x) * _multiplications(one.layer)
                _run(run_attention, work, record, self.sizes, batch, own, scratch, rows)
                self._runs.feed_forward(one, scratch, rows)

    def _scratch(self, count: int, parts: int, attention_input: torch.Tensor | None) -> Scratch:
        """Return memory for a pass over a number of rows, and parts of attention."""
        inner = count * self._experts, self._inner
        return make_scratch(
            self.config, count, parts=parts, inner=inner, attention_input=attention_input
        )


class OffloadedNets:
    """Some packed layers with gated delta nets, some of which have their routed experts in a
    cache."""

    def __init__(
        self, config: DeltaConfig, layers: Sequence[PackedOffloaded], cache: ExpertCache
    ) -> None:
        self._nets = DeltaDecoder(config, [one.layer for one in layers])
        self.config, self.layers, self.cache = config, tuple(layers), cache
        self._runs = ExpertRuns(self._nets.sizes, cache)

    def __len__(self) -> int:
        return len(self.layers)

    def part(self, first: int, stop: int) -> OffloadedNets:
        """Return layers [first, stop) as a decoder of their own, with the same cache."""
        return OffloadedNets(self.config, self.layers[first:stop], self.cache)

    def __call__(self, x: torch.Tensor, layout: StateLayout, state: DeltaState) -> None:
        """Run the stream x [T, d] through the layers, in place, and advance the states. Raises what
        reading an expert raises."""
        check_delta_pass(self.config, len(self), x, layout, state)
        nets, spans, rows = self._nets, spans_of(layout), x.numpy()
        scratch = nets.scratch(len(x), int(spans.starts[-1]))
        with self.cache.passing:
            for number, one in enumerate(self.layers):
                pool = Pool(*(tensor[number].numpy() for tensor in state))
                record = one.layer.record
                work = len(x) * _multiplications(one.layer) + nets.state_work(spans)
                _run(run_net, work, record, nets.sizes, spans, pool, scratch, rows)
                self._runs.feed_forward(one, scratch, rows)


@dataclass(frozen=True)
class ExpertRuns:
    """Runs of a pass through experts, some of which are in a cache."""

    sizes: Sizes | NetSizes
    cache: ExpertCache

    def feed_forward(
        self, one: PackedOffloaded, scratch: Scratch | NetScratch, x: np.ndarray
    ) -> None:
        """Add the experts' output to the stream x [T, d]: those that are held are multiplied while
        others are read."""
        routed, shared = (int(one.layer.record[name][0]) for name in ("routed", "shared"))
        pairs = sorted_pairs(scratch.picked, routed, shared)
        picked = np.flatnonzero(np.diff(pairs.ends[: routed + 1])).tolist()
        always = list(range(routed, routed + shared))
        if one.experts is None:
            self._run_experts(one.layer, scratch, pairs, picked + always, picked + always, x)
            return
        waves = list(self.cache.waves(one.experts, picked))
        for number, wave in enumerate(waves, 1):
            after, reading = always if number == len(waves) else [], list[Reading]()
            try:
                ready = [*self.cache.fetch(one.experts, wave, reading), *after]
                while reading:
                    if ready:
                        self._run_experts(one.layer, scratch, pairs, ready, [], x)
                    ready = self.cache.arrived(one.experts, reading)
            except BaseException:
                self.cache.give_up(one.experts, wave, reading)
                raise
            self._run_experts(one.layer, scratch, pairs, ready, [*wave, *after], x)

    def _run_experts(
        self,
        layer: PackedLayer,
        scratch: Scratch | NetScratch,
        pairs: Pairs,
        made: Sequence[int],
        added: Sequence[int],
        x: np.ndarray,
    ) -> None:
        """Make the inner values of some experts, and add the outputs of some, in this order."""
        work = len(pairs.rows) * layer.inner * self.sizes.hidden * 3
        numbers = (np.array(experts, np.int64) for experts in (made, added))
        _run(run_experts, work, layer.record, self.sizes, scratch, pairs, *numbers, x)


def sorted_pairs(picked: np.ndarray, routed: int, shared: int) -> Pairs:
    """Return the pairs of rows and the experts that they picked [T, k], then those of shared
    experts, which have all rows."""
    count, each = picked.shape
    flat = picked.reshape(-1)[: count * each if routed else 0]
    places = flat.argsort(kind="stable")
    numbers = np.concatenate([np.bincount(flat, minlength=routed), np.full(shared, count)])
    return Pairs(
        np.concatenate([places // each, np.tile(np.arange(count), shared)]),
        np.concatenate([places, np.full(count * shared, -1)]),
        np.concatenate([np.zeros(1, np.int64), numbers.cumsum()]),
    )


def _multiplications(layer: PackedLayer) -> int:
    """Return multiplications of a row in attention and router, at most."""
    experts = layer.shapes["gate_up"], layer.shapes["expert_down"]
    return layer.multiplications - sum(int(np.prod(shape)) for shape in experts if shape)


def _run(function: Any, multiplications: int, *arguments: Any) -> None:
    team = process_team()
    team.run(function, team.threads_for(multiplications), *arguments)


@compiled
def run_attention(
    member: Any, table: Any, sizes: Any, batch: Any, cache: Any, scratch: Any, x: Any
) -> None:
    """Add attention of table[0] to x [T, d], and pick the rows' experts in scratch."""
    batch, cache, scratch, x = borrowed((batch, cache, scratch, x))
    attention(member, table[0], sizes, batch, cache, scratch, x)
    route(member, table[0], sizes, scratch, x)


@compiled
def run_net(
    member: Any, table: Any, sizes: Any, spans: Any, pool: Any, scratch: Any, x: Any
) -> None:
    """Add the gated delta net of table[0] to x [T, d], and pick the rows' experts in scratch."""
    spans, pool, scratch, x = borrowed((spans, pool, scratch, x))
    delta_net(member, table[0], sizes, spans, pool, scratch, x)
    route(member, table[0], sizes, scratch, x)


@compiled
def run_experts(
    member: Any, table: Any, sizes: Any, scratch: Any, pairs: Any, made: Any, added: Any, x: Any
) -> None:
    """Make the inner values of some experts of table[0] in scratch, then add the outputs of some
    to x [T, d]."""
    scratch, pairs, x = borrowed((scratch, pairs, x))
    layer = table[0]
    make_inner(member, layer, sizes, scratch, pairs.rows, pairs.ends, made)
    if added.size:
        wait(member)
        add_experts(member, layer, sizes, scratch, pairs.rows, pairs.places, pairs.ends, added, x)
