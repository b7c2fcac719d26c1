"""Packing of a decoder layer's weights for compiled code: panels of 32 outputs, one copy, filled
row by row as a matrix is read.

Matrices are kept in float32 or bf16, but for routers, whose choices depend on every bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Generic, NamedTuple, Self, TypeVar, cast

import numpy as np
import torch

from mtp_kernels.cpu.code import LANES
from mtp_kernels.cpu.memory import Arena
from mtp_kernels.cpu.vectors import PANEL
from mtp_kernels.decoder import (
    DecoderConfig,
    GroupedWeights,
    LatentWeights,
    LayerWeights,
    Matrix,
    Rope,
    pieces_of,
)
from mtp_kernels.decoder.checks import check_config
from mtp_kernels.decoder.compiled_cpu.rows import panels_of
from mtp_kernels.sizes import GroupedSizes, LatentSizes, Routing, Shapes

Layer = TypeVar("Layer")

# A layer as compiled code sees it: addresses of packed weights, 0 where there is none, then counts.
PARTS = (LatentWeights, GroupedWeights, LayerWeights)
ADDRESSES = {field.name for part in PARTS for field in fields(part)} - {"attention"}
COUNTS = (
    "routed",  # experts to pick from, 0 in a dense layer
    "shared",  # experts behind them for every row; a dense layer has one
    "inner",  # width of an expert
)
LAYER = np.dtype([(name, np.int64) for name in (*sorted(ADDRESSES), *COUNTS)])


class Sizes(NamedTuple):
    """DecoderConfig as compiled code takes it; the type of attention says which code that is."""

    hidden: int
    heads: int
    kv_heads: int  # keys of a cached token
    value_at: int  # floats from a cached key to its value
    attention: LatentSizes | GroupedSizes
    routing: Routing  # its scale is float32
    norm_eps: Any  # float32
    softmax_scale: Any  # float32
    entry_bytes: int  # of the packed matrices, as in a Panel


@dataclass(frozen=True)
class PackedLayer:
    """The tensors that own a layer's memory, and the record [1] of LAYER that points into them."""

    shapes: Shapes
    tensors: tuple[torch.Tensor, ...]
    record: np.ndarray

    @property
    def inner(self) -> int:
        """The width of an expert."""
        return int(self.record["inner"][0])

    @property
    def multiplications(self) -> int:
        """Multiplications for each row, at most."""
        return sum(tensor.numel() for tensor in self.tensors)

    def experts_per_row(self, picked: int) -> int:
        """Return the number of experts that a row goes through, given those picked."""
        return int(self.record["shared"][0]) + picked * bool(self.record["routed"][0])


def sizes_of(config: DecoderConfig, entry_bytes: int) -> Sizes:
    """Return the config's numbers in the types that compiled code computes in."""
    attention, routing = config.attention, config.routing
    kv_heads, value_at = 1, 0
    if isinstance(attention, GroupedSizes):
        kv_heads, value_at = attention.kv_heads, attention.kv_heads * attention.head
    return Sizes(
        hidden=config.hidden,
        heads=attention.heads,
        kv_heads=kv_heads,
        value_at=value_at,
        attention=attention,
        routing=routing._replace(scale=cast(Any, np.float32(routing.scale))),
        norm_eps=np.float32(config.norm_eps),
        softmax_scale=np.float32(config.softmax_scale),
        entry_bytes=entry_bytes,
    )


class PackedLayers(Generic[Layer]):
    """Some packed layers of a model, with the rotary positions that they share.

    entry_bytes: of the packed matrices, as in a Panel.
    """

    def __init__(
        self, config: DecoderConfig, layers: Sequence[Layer], rope: Rope, entry_bytes: int
    ) -> None:
        check_config(config, rope.inv_freq)
        self.config, self.layers, self._rope = config, tuple(layers), rope
        self.sizes = sizes_of(config, entry_bytes)
        self.rotation = rope.inv_freq.contiguous().numpy(), np.float32(rope.attention_scaling)

    def __len__(self) -> int:
        return len(self.layers)

    def part(self, first: int, stop: int) -> Self:
        """Return layers [first, stop) as a decoder of their own."""
        layers = self.layers[first:stop]
        return type(self)(self.config, layers, self._rope, self.sizes.entry_bytes)


# Stored types of packed matrices; bf16 as its bits.
KINDS: dict[torch.dtype, type[np.generic]] = {torch.float32: np.float32, torch.bfloat16: np.uint16}


@dataclass(frozen=True)
class Packer:
    """Packs matrices side by side into an arena, in float32 or bf16 (rounded to nearest)."""

    arena: Arena
    dtype: torch.dtype

    @property
    def entry_bytes(self) -> int:
        """Bytes of an entry of the packed matrices, as in a Panel."""
        return self.dtype.itemsize

    def matrix(self, matrix: Matrix) -> np.ndarray:
        """Return [..., out, in] as panels [..., out / 32, in, 32], zeros past the last output."""
        *several, rows, columns = matrix.shape
        place = self._take(*several, panels_of(rows), columns, PANEL)
        self._fill([*place.reshape(-1, *place.shape[-3:])], rows, matrix)
        return place

    def alternating(self, gate_up: Matrix) -> np.ndarray:
        """Return panels [e, panel, 2, d, 32] of gate and up in turn, given both [e, 2*i, d]."""
        experts, rows, columns = gate_up.shape
        place = self._take(experts, panels_of(rows // 2), 2, columns, PANEL)
        halves = [panels[:, half] for panels in place for half in range(2)]
        self._fill(halves, rows // 2, gate_up)
        return place

    def vector(self, values: torch.Tensor) -> np.ndarray:
        """Return a copy of a vector, in float32."""
        place = self.arena.take(*values.shape)
        place[...] = values.numpy()
        return place

    def _take(self, *shape: int) -> np.ndarray:
        return self.arena.take(*shape, dtype=KINDS[self.dtype])

    def _fill(self, places: Sequence[np.ndarray], rows: int, matrix: Matrix) -> None:
        """Write matrices of a number of rows, as they are read, to the panels of each."""
        for panels in places if rows % PANEL else ():
            panels[-1] = 0
        at, end = 0, rows * len(places)
        for piece in pieces_of(matrix):
            while len(piece) and at < end:
                number, start = divmod(at, rows)
                part, piece = piece[: rows - start], piece[rows - start :]
                self._write(places[number], start, part)
                at += len(part)
            at += len(piece)
        if at != end:
            raise ValueError(f"matrix: expected {end} rows, found {at}")

    def _write(self, panels: np.ndarray, start: int, rows: torch.Tensor) -> None:
        """Write rows [n, in] of a matrix, from one on, to panels [panel, in, 32]: as columns."""
        if self.dtype is torch.bfloat16:
            rows = rows.bfloat16().view(torch.int16)
            lines = panels.view(np.int16).reshape(*panels.shape[:-1], LANES, 2).swapaxes(-1, -2)
        else:
            lines = panels[..., None, :]
        columns, stop = rows.numpy().T, start + len(rows)
        parts, width = lines.shape[-2:]
        for number in range(start // width, -(-stop // width)):
            first, last = max(start, number * width), min(stop, (number + 1) * width)
            lanes = slice(first - number * width, last - number * width)
            line = lines[number // parts, :, number % parts]
            line[:, lanes] = columns[:, first - start : last - start]


def pack_layer(weights: LayerWeights, packer: Packer) -> PackedLayer:
    """Pack one layer; its own tensors may then be dropped."""
    given = weights.tensors
    made = {"gate_up": packer.alternating(given.pop("gate_up"))}
    for name, tensor in given.items():
        if tensor is None:
            continue
        exact = Packer(packer.arena, torch.float32) if name == "router" else packer
        made[name] = exact.matrix(tensor) if len(tensor.shape) > 1 else packer.vector(tensor)
    tensors = {name: torch.from_numpy(array) for name, array in made.items()}
    record = np.zeros(1, LAYER)
    for name, tensor in tensors.items():
        record[name] = tensor.data_ptr()
    routed = 0 if weights.router is None else len(weights.router)
    record["routed"], record["shared"] = routed, weights.gate_up.shape[0] - routed
    record["inner"] = weights.gate_up.shape[1] // 2
    return PackedLayer(weights.shapes(), tuple(tensors.values()), record)


def table_of(layers: Sequence[PackedLayer]) -> np.ndarray:
    """Return the layers' records [layers]."""
    return np.concatenate([layer.record for layer in layers])
