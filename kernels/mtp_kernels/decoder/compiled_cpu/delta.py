"""Decoder layers with gated delta nets in place of attention: a pass over them is one call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numba import carray

from mtp_kernels.batch_layout import StateLayout
from mtp_kernels.cpu.code import FLOAT_BYTES
from mtp_kernels.cpu.delta_rule import READ_COST, Pool, Spans, delta_rule
from mtp_kernels.cpu.elementwise import sigmoid
from mtp_kernels.cpu.jit import compiled, inner
from mtp_kernels.cpu.panel_forms import PANEL
from mtp_kernels.cpu.team import process_team, share, wait
from mtp_kernels.cpu.vectors import address, borrowed, floats
from mtp_kernels.decoder import DeltaConfig
from mtp_kernels.decoder.checks import check_delta_config, check_delta_pass, check_layers
from mtp_kernels.decoder.compiled_cpu.attention import add_output
from mtp_kernels.decoder.compiled_cpu.experts import feed_forward
from mtp_kernels.decoder.compiled_cpu.rows import (
    BLOCK_ROWS,
    norm_block,
    norm_row,
    panel_of,
    panels_of,
    project,
    vector,
)
from mtp_kernels.decoder.compiled_cpu.scratch import float_arrays
from mtp_kernels.decoder.compiled_cpu.weights import PackedLayer, inner_sizes, table_of
from mtp_kernels.gated_delta.compiled_cpu import convolved, spans_of
from mtp_kernels.gated_delta.state import DeltaState
from mtp_kernels.sizes import DeltaSizes, Routing


class NetSizes(NamedTuple):
    """DeltaConfig as compiled code takes it."""

    hidden: int
    attention: DeltaSizes
    routing: Routing  # its scale is float32
    has_softmax: bool
    norm_eps: Any  # float32


class NetScratch(NamedTuple):
    """Memory that the team shares during a pass; its content means nothing between layers."""

    projected: Any  # [T, channels, output gates, whole panels; betas, decays, whole panels]
    gates: Any  # [T, 2, h]: log decay and beta
    values: Any  # [T, h*v]
    normed: Any  # [T, d]
    weights: Any  # [T, k] of the picked experts
    shared_weights: Any  # [T] of shared experts
    inner: Any  # [T * experts per row, whole panels]
    picked: Any  # [T, k] experts
    rows: Any  # Convolved


@compiled
def run_nets(
    member: Any, table: Any, sizes: Any, spans: Any, pools: Pool, scratch: Any, x: Any
) -> None:
    """Run the stream x [T, d] through all layers, in place; pools [layers, ...]."""
    spans, pools, scratch, x = borrowed((spans, pools, scratch, x))
    for index in range(table.size):
        layer = table[index]
        pool = Pool(pools.states[index], pools.inputs[index], pools.gates[index])
        delta_net(member, layer, sizes, spans, pool, scratch, x)
        feed_forward(member, layer, sizes, scratch, x)


@inner
def delta_net(
    member: Any, layer: Any, sizes: Any, spans: Any, pool: Any, scratch: Any, x: Any
) -> None:
    """Add a gated delta net to the stream x [T, d], and advance the layer's pool."""
    own = sizes.attention
    project_inputs(member, layer, sizes, scratch, x)
    wait(member)
    make_gates(member, layer, own, scratch)
    wait(member)
    channels = 2 * own.key_heads * own.key + own.value_heads * own.value
    taps = carray(floats(layer.convolution), (own.width, channels))
    values = scratch.values
    delta_rule(
        member, scratch.projected, scratch.gates, taps, pool, spans, own, scratch.rows, values
    )
    norm_values(member, layer, sizes, scratch)
    wait(member)
    add_output(member, layer, sizes, values, x)
    wait(member)


@inner
def input_panels(own: Any) -> Any:
    """Return the panels of channels and output gates, which those of betas and decays follow."""
    return panels_of(2 * (own.key_heads * own.key + own.value_heads * own.value))


@inner
def project_inputs(member: Any, layer: Any, sizes: Any, scratch: Any, x: Any) -> None:
    """Norm and project all rows by the member's panels."""
    normed = np.empty((BLOCK_ROWS, sizes.hidden), np.float32)
    norm, width = vector(layer.input_norm, sizes.hidden), scratch.projected.shape[1]
    panels = input_panels(sizes.attention)
    weight = panel_of(layer.inputs, layer.inputs_form, 0, sizes.hidden)
    gates = panel_of(layer.gate_inputs, layer.gate_inputs_form, 0, sizes.hidden)
    first, last = share(member, width // PANEL)
    for row in range(0, x.shape[0], BLOCK_ROWS):
        block = norm_block(x, row, norm, sizes.norm_eps, normed)
        out = address(scratch.projected[row])
        if first < panels:
            project(block, weight, (first, min(last, panels)), out, width)
        if last > panels:
            out += FLOAT_BYTES * panels * PANEL
            project(block, gates, (max(first - panels, 0), last - panels), out, width)


@inner
def make_gates(member: Any, layer: Any, own: Any, scratch: Any) -> None:
    """Make log decays and betas of the member's rows."""
    heads, start = own.value_heads, input_panels(own) * PANEL
    rate, bias = vector(layer.rate, heads), vector(layer.decay_bias, heads)
    first, last = share(member, scratch.gates.shape[0])
    for row in range(first, last):
        source, out = scratch.projected[row, start:], scratch.gates[row]
        for head in range(heads):
            decay = np.float32(source[heads + head] + bias[head])
            out[0, head] = rate[head] * softplus(decay)
            out[1, head] = sigmoid(source[head])


@inner
def softplus(x: Any) -> Any:
    """Return log(1 + exp(x)) of a float32; x above 20, from where on they are equal."""
    if x > np.float32(20.0):
        return x
    return np.float32(math.log1p(math.exp(np.float64(x))))


@inner
def norm_values(member: Any, layer: Any, sizes: Any, scratch: Any) -> None:
    """Norm what value heads read, each by itself, and multiply it with its output gates."""
    own = sizes.attention
    size, normed = own.value, np.empty(own.value, np.float32)
    norm = vector(layer.value_norm, size)
    first, last = share(member, scratch.values.shape[0] * own.value_heads)
    for unit in range(first, last):
        row, head = unit // own.value_heads, unit % own.value_heads
        out = scratch.values[row, head * size : (head + 1) * size]
        start = 2 * own.key_heads * own.key + (own.value_heads + head) * size
        gates = scratch.projected[row, start : start + size]
        norm_row(out, norm, sizes.norm_eps, normed)
        for column in range(size):
            gate = gates[column]
            out[column] = normed[column] * (gate * sigmoid(gate))


class DeltaDecoder:
    """Some packed layers of a model with gated delta nets, run by one launch."""

    def __init__(self, config: DeltaConfig, layers: Sequence[PackedLayer]) -> None:
        check_delta_config(config)
        check_layers(config, layers)
        self.config, self.layers = config, tuple(layers)
        self._table, self.sizes = table_of(layers), sizes_of(config)
        self._experts, self._inner = inner_sizes(layers, config.routing.experts_per_token)

    def __len__(self) -> int:
        return len(self.layers)

    def part(self, first: int, stop: int) -> DeltaDecoder:
        """Return layers [first, stop) as a decoder of their own."""
        return DeltaDecoder(self.config, self.layers[first:stop])

    def __call__(self, x: torch.Tensor, layout: StateLayout, state: DeltaState) -> None:
        """Run the stream x [T, d] through the layers, in place, and advance the states."""
        check_delta_pass(self.config, len(self), x, layout, state)
        spans, team = spans_of(layout), process_team()
        weights = len(x) * sum(layer.multiplications for layer in self.layers)
        team.run(
            run_nets,
            team.threads_for(weights + len(self) * self.state_work(spans)),
            self._table,
            self.sizes,
            spans,
            Pool(*(tensor.numpy() for tensor in state)),
            self.scratch(len(x), int(spans.starts[-1])),
            x.numpy(),
        )

    def state_work(self, spans: Spans) -> int:
        """Return the multiplications that states take in a layer, reading them included."""
        sizes = self.config.attention
        rows = int(spans.starts[-1]) + READ_COST * len(spans.slots)
        return 4 * rows * sizes.output * sizes.key

    def scratch(self, count: int, rows: int) -> NetScratch:
        """Return memory for a pass over a number of rows, and of those with replayed ones."""
        own, picked = self.config.attention, self.config.routing.experts_per_token
        panels = panels_of(own.channels + own.output) + panels_of(2 * own.value_heads)
        arrays = float_arrays(
            (count, panels * PANEL),
            (count, 2, own.value_heads),
            (count, own.output),
            (count, self.config.hidden),
            (count, picked),
            (count,),
            (count * self._experts, self._inner),
        )
        return NetScratch(*arrays, np.empty((count, picked), np.int64), convolved(rows, own))


def sizes_of(config: DeltaConfig) -> NetSizes:
    """Return the config's numbers in the types that compiled code computes in."""
    scale = cast(Any, np.float32(config.routing.scale))
    return NetSizes(
        hidden=config.hidden,
        attention=config.attention,
        routing=config.routing._replace(scale=scale),
        has_softmax=config.has_softmax,
        norm_eps=np.float32(config.norm_eps),
    )
