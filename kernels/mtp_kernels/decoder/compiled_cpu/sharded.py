"""One process's part of every layer, whose stages are called one by one: between them rows are
gathered. They are the steps of a whole pass, so that every number has the same bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mtp_kernels.batch_layout import BatchLayout
from mtp_kernels.cpu.jit import compiled
from mtp_kernels.cpu.panel_forms import PANEL, Panel
from mtp_kernels.cpu.team import process_team, share
from mtp_kernels.cpu.vectors import address, borrowed, rows_of
from mtp_kernels.decoder import LayerShard, Matrix, Pairs
from mtp_kernels.decoder.checks import check_pass
from mtp_kernels.decoder.compiled_cpu.attention import attend
from mtp_kernels.decoder.compiled_cpu.experts import make_inner, picked_by_any, route
from mtp_kernels.decoder.compiled_cpu.packing import PackedStack, Packer
from mtp_kernels.decoder.compiled_cpu.passes import Projection
from mtp_kernels.decoder.compiled_cpu.rows import (
    BLOCK_ROWS,
    STRIP,
    STRIP_PANELS,
    block_of,
    copy,
    panel_in,
    panels_of,
    project,
)
from mtp_kernels.decoder.compiled_cpu.scratch import make_scratch, planned
from mtp_kernels.decoder.compiled_cpu.weights import (
    LAYER,
    PackedLayer,
    PackedLayers,
    pack_layer,
)


@dataclass(frozen=True)
class _Mlp:
    """A shared expert, or a dense layer's MLP: gate and up as a table [1] of LAYER, and down."""

    table: np.ndarray
    packed: PackedStack  # owns what the table points to
    inner: int
    down: Projection

    @classmethod
    def of(cls, gate_up: Matrix, down: Matrix, packer: Packer) -> _Mlp:
        packed, inner = packer.stack(gate_up, parts=2), gate_up.shape[1] // 2
        table = np.zeros(1, LAYER)
        table["gate_up"], table["inner"] = packed.table.ctypes.data, inner
        return cls(table, packed, inner, Projection.packed(down, packer))


@dataclass(frozen=True)
class PackedShard:
    """A layer's attention, output projection and routed experts, and its shared experts."""

    layer: PackedLayer
    mlps: tuple[_Mlp, ...]


def pack_shard(part: LayerShard, packer: Packer) -> PackedShard:
    """Pack one layer's part; its own tensors may then be dropped."""
    mlps = tuple(_Mlp.of(*matrices, packer) for matrices in part.shared)
    return PackedShard(pack_layer(part.weights, packer), mlps)


class ShardedDecoder(PackedLayers[PackedShard]):
    """Parts of some layers."""

    def begin(
        self,
        x: torch.Tensor,
        layout: BatchLayout,
        kv_cache: torch.Tensor,
        attention_input: torch.Tensor | None = None,
    ) -> ShardedPass:
        """Begin a pass of the stream x [T, d], which its caller changes between the stages."""
        layers = [packed.layer for packed in self.layers]
        check_pass(
            self.config,
            layers,
            x=x,
            layout=layout,
            kv_cache=kv_cache,
            attention_input=attention_input,
        )
        return ShardedPass(self, x, layout, kv_cache, attention_input)


class ShardedPass:
    """Stages of one pass, in the order in which they are called for each layer."""

    def __init__(
        self,
        decoder: ShardedDecoder,
        x: torch.Tensor,
        layout: BatchLayout,
        kv_cache: torch.Tensor,
        attention_input: torch.Tensor | None,
    ) -> None:
        self._decoder, self._x = decoder, x
        self._sizes, self._team = decoder.sizes, process_team()
        self._caches = kv_cache.flatten(1, 2).numpy()
        self._batch, parts = planned(layout, kv_cache.shape[2], decoder.rotation, self._sizes.heads)
        self._scratch = make_scratch(
            decoder.config, len(x), parts=parts, inner=(0, PANEL), attention_input=attention_input
        )

    def attended(self, layer: int) -> torch.Tensor:
        """Return the values [T, h*v] that the own heads attended to."""
        packed = self._decoder.layers[layer]
        self._run(
            run_attend,
            len(self._x) * packed.layer.multiplications,
            packed.layer.record,
            self._sizes,
            self._batch,
            self._caches[layer],
            self._scratch,
            self._x.numpy(),
        )
        return torch.from_numpy(self._scratch.values)

    def output(self, layer: int, values: torch.Tensor) -> torch.Tensor:
        """Return values times the output projection that this part has."""
        packed = self._decoder.layers[layer].layer
        shape = packed.shapes["output"]
        assert shape is not None, "every layer has one"
        at, form = (int(packed.record[name][0]) for name in ("output", "output_form"))
        panel = Panel(at, shape[1], form)
        return Projection(shape[0], panel)(values)

    def picked(self, layer: int) -> torch.Tensor | None:
        """Norm the rows, and return the experts [T, k] that they pick; None in a dense layer."""
        record = self._decoder.layers[layer].layer.record
        work = len(self._x) * self._sizes.hidden * (1 + int(record["routed"][0]))
        self._run(run_route, work, record, self._sizes, self._scratch, self._x.numpy())
        return torch.from_numpy(self._scratch.picked) if record["routed"][0] else None

    def experts(self, layer: int, pairs: Pairs) -> torch.Tensor:
        """Return the outputs [p, d] of the own experts for their pairs."""
        packed = self._decoder.layers[layer].layer
        out = self._x.new_empty(len(pairs.rows), self._sizes.hidden)
        if len(out):
            scratch = self._with_inner(len(out), packed.inner)
            work = len(out) * packed.inner * self._sizes.hidden
            record, ends, sizes = packed.record, pairs.ends.numpy(), self._sizes
            self._run(run_inner, 2 * work, record, sizes, scratch, pairs.rows.numpy(), ends)
            self._run(run_down, work, record, sizes, scratch.inner, ends, out.numpy())
        return out

    def add(self, x: torch.Tensor, pairs: Pairs, outputs: torch.Tensor) -> None:
        """Add the outputs [p, d] of pairs to x [T, d], each times its weight, in their order."""
        weights = self._scratch.weights.reshape(-1)
        rows, places = pairs.rows.numpy(), pairs.places.numpy()
        self._run(run_add, outputs.numel(), rows, places, weights, outputs.numpy(), x.numpy())

    def shared_inner(self, layer: int, number: int) -> torch.Tensor:
        """Return silu(gate) * up [T, i] of a shared expert."""
        mlp, count = self._decoder.layers[layer].mlps[number], len(self._x)
        scratch = self._with_inner(count, mlp.inner)
        rows, ends = np.arange(count), np.array([0, count])
        work = 2 * count * mlp.inner * self._sizes.hidden
        self._run(run_inner, work, mlp.table, self._sizes, scratch, rows, ends)
        return torch.from_numpy(scratch.inner)[:, : mlp.inner].contiguous()

    def shared_down(self, layer: int, number: int, values: torch.Tensor) -> torch.Tensor:
        """Return inner values times a shared expert's down projection that this part has."""
        return self._decoder.layers[layer].mlps[number].down(values)

    def _run(self, function: Any, multiplications: int, *arguments: Any) -> None:
        self._team.run(function, self._team.threads_for(multiplications), *arguments)

    def _with_inner(self, pairs: int, inner: int) -> Any:
        """Return the pass's memory with room for the inner values of pairs."""
        values = np.empty((pairs, panels_of(inner) * PANEL), np.float32)
        return self._scratch._replace(inner=values)


@compiled
def run_attend(
    member: Any, table: Any, sizes: Any, batch: Any, cache: Any, scratch: Any, x: Any
) -> None:
    """Make the values [T, h*v] of the heads of table[0] in scratch; cache [slots, c+r]."""
    batch, cache, scratch, x = borrowed((batch, cache, scratch, x))
    attend(member, table[0], sizes, batch, cache, scratch, x)


@compiled
def run_route(member: Any, table: Any, sizes: Any, scratch: Any, x: Any) -> None:
    """Norm rows x [T, d] and pick their experts in scratch."""
    scratch, x = borrowed((scratch, x))
    route(member, table[0], sizes, scratch, x)


@compiled
def run_inner(member: Any, table: Any, sizes: Any, scratch: Any, rows: Any, ends: Any) -> None:
    """Compute silu(gate) * up of pairs [ends[e], ends[e+1]) of every expert of table[0]."""
    scratch, rows, ends = borrowed((scratch, rows, ends))
    make_inner(member, table[0], sizes, scratch, rows, ends, picked_by_any(ends))


@compiled
def run_down(member: Any, table: Any, sizes: Any, inner_values: Any, ends: Any, out: Any) -> None:
    """Write down(inner) [pairs, d] of every pair of an expert of table[0], by panels of the
    output."""
    inner_values, ends, out = borrowed((inner_values, ends, out))
    layer = table[0]
    panels, inputs = panels_of(out.shape[1]), rows_of(inner_values)
    made = np.empty((BLOCK_ROWS, STRIP), np.float32)
    first, last = share(member, panels)
    for panel in range(first, last, STRIP_PANELS):
        column, count = panel * PANEL, min(STRIP_PANELS, last - panel)
        size = min(count * PANEL, out.shape[1] - column)
        for expert in range(ends.size - 1):
            packed = panel_in(layer.expert_down, expert, panel, layer.inner)
            for start in range(ends[expert], ends[expert + 1], BLOCK_ROWS):
                block = block_of(inputs, start, ends[expert + 1])
                project(block, packed, (0, count), address(made), STRIP)
                for r in range(block.count):
                    copy(made[r], out[start + r, column : column + size])


@compiled
def run_add(member: Any, rows: Any, places: Any, weights: Any, outputs: Any, x: Any) -> None:
    """Add weight * output to x [T, d], pair by pair, by panels of x."""
    first, last = share(member, panels_of(x.shape[1]))
    for panel in range(first, last):
        start = panel * PANEL
        stop = min(start + PANEL, x.shape[1])
        for pair in range(rows.size):
            weight = weights[places[pair]]
            for column in range(start, stop):
                x[rows[pair], column] += weight * outputs[pair, column]
