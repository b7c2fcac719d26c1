"""Packing of a decoder layer's weights for compiled code: panels of 32 outputs, one copy, filled
row by row as a matrix is read.

Matrices are kept in float32 or bf16, but for routers, whose choices depend on every bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from mtp_kernels.cpu.code import LANES
from mtp_kernels.cpu.memory import Arena
from mtp_kernels.cpu.vectors import PANEL
from mtp_kernels.decoder.compiled_cpu.rows import panels_of
from mtp_kernels.decoder.interface import DecoderConfig, LayerWeights, Matrix, pieces_of
from mtp_kernels.sizes import GroupedSizes, LatentSizes, Routing, Shapes

# A layer as compiled code sees it: addresses of packed weights, 0 where there is none, then counts.
# n is the width of a head, which grouped queries share with their keys and values.
ADDRESSES = (
    "input_norm",  # [d], 0 where attention is given rows [T, w]; w is d elsewhere
    "down",  # w to [query or its rank | latent | rope key]
    "query_norm",  # [query_rank], or [n]
    "query_up",  # by head, query_rank to n+r
    "latent_norm",  # [c]
    "key_up",  # by head, n to c
    "value_up",  # by head, c to v
    "qkv",  # w to [queries | keys | values]
    "bias",  # [queries | keys | values]
    "key_norm",  # [n]
    "output",  # h*v to d
    "post_norm",  # [d]
    "router",  # d to e
    "router_bias",  # [e]
    "gate_up",  # by expert, d to i, panels of gate and up alternating
    "expert_down",  # by expert, i to d
)
COUNTS = (
    "routed",  # experts to pick from, 0 in a dense layer
    "shared",  # experts behind them for every row; a dense layer has one
    "inner",  # width of an expert
)
LAYER = np.dtype([(name, np.int64) for name in (*ADDRESSES, *COUNTS)])


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


VECTORS = (
    "input_norm",
    "query_norm",
    "latent_norm",
    "bias",
    "key_norm",
    "post_norm",
    "router_bias",
)


def pack_layer(weights: LayerWeights, packer: Packer) -> PackedLayer:
    """Pack one layer; its own tensors may then be dropped."""
    given = weights.tensors
    made = {"gate_up": packer.alternating(given.pop("gate_up"))}
    for name, tensor in given.items():
        if tensor is None:
            continue
        own = Packer(packer.arena, torch.float32) if name == "router" else packer
        made[name] = own.vector(tensor) if name in VECTORS else own.matrix(tensor)
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
