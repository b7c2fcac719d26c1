"""Packing of a decoder layer's weights for compiled code: panels of 32 outputs, one copy.

Matrices are kept in float32 or bf16, but for routers, whose choices depend on every bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from mtp_kernels.cpu.code import LANES
from mtp_kernels.cpu.memory import Arena
from mtp_kernels.cpu.vectors import PANEL
from mtp_kernels.decoder.compiled_cpu.rows import panels_of
from mtp_kernels.decoder.interface import DecoderConfig, LayerWeights, Shapes

# A layer as compiled code sees it: addresses of packed weights, then counts. The addresses are in
# the order in which pack_layer packs.
LAYER = np.dtype(
    [
        ("input_norm", np.int64),  # [d]
        ("down", np.int64),  # d to [query or its rank | latent | rope key]
        ("query_norm", np.int64),  # [query_rank]
        ("query_up", np.int64),  # by head, query_rank to n+r
        ("latent_norm", np.int64),  # [c]
        ("key_up", np.int64),  # by head, n to c
        ("value_up", np.int64),  # by head, c to v
        ("output", np.int64),  # h*v to d
        ("post_norm", np.int64),  # [d]
        ("router", np.int64),  # d to e
        ("router_bias", np.int64),  # [e]
        ("gate_up", np.int64),  # by expert, d to i, panels of gate and up alternating
        ("expert_down", np.int64),  # by expert, i to d
        ("routed", np.int64),  # experts to pick from, 0 in a dense layer
        ("shared", np.int64),  # experts behind them for every row; a dense layer has one
        ("inner", np.int64),  # width of an expert
    ]
)


class Sizes(NamedTuple):
    """DecoderConfig as compiled code takes it."""

    hidden: int
    heads: int
    nope: int
    rope: int
    value: int
    latent: int
    query_rank: int
    groups: int
    groups_per_token: int
    normalise_weights: bool
    routed_scale: Any  # float32
    norm_eps: Any  # float32
    softmax_scale: Any  # float32
    kind: Any  # of the packed matrices, as in a Panel


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


def sizes_of(config: DecoderConfig, kind: Any) -> Sizes:
    """Return the config's numbers in the types that compiled code computes in."""
    return Sizes(
        hidden=config.hidden,
        heads=config.heads,
        nope=config.nope,
        rope=config.rope,
        value=config.value,
        latent=config.latent,
        query_rank=config.query_rank,
        groups=config.expert_groups,
        groups_per_token=config.groups_per_token,
        normalise_weights=config.normalise_weights,
        routed_scale=np.float32(config.routed_scale),
        norm_eps=np.float32(config.norm_eps),
        softmax_scale=np.float32(config.softmax_scale),
        kind=kind,
    )


# Stored types of packed matrices; bf16 as its bits.
KINDS: dict[torch.dtype, type[np.generic]] = {torch.float32: np.float32, torch.bfloat16: np.uint16}


@dataclass(frozen=True)
class Packer:
    """Packs matrices side by side into an arena, in float32 or bf16 (rounded to nearest)."""

    arena: Arena
    dtype: torch.dtype

    @property
    def kind(self) -> np.generic:
        """The kind of the packed matrices, as in a Panel."""
        return KINDS[self.dtype](0)

    def matrix(self, matrix: torch.Tensor) -> np.ndarray:
        """Return [..., out, in] as panels [..., out / 32, in, 32], zeros past the last output."""
        *several, rows, columns = matrix.shape
        place = self._take(*several, panels_of(rows), columns, PANEL)
        self._fill(place, matrix)
        return place

    def alternating(self, gate: torch.Tensor, up: torch.Tensor) -> np.ndarray:
        """Return panels [e, panel, 2, d, 32] of gate and up in turn."""
        experts, rows, columns = gate.shape
        place = self._take(experts, panels_of(rows), 2, columns, PANEL)
        self._fill(place[:, :, 0], gate)
        self._fill(place[:, :, 1], up)
        return place

    def optional(self, matrix: torch.Tensor | None) -> np.ndarray:
        """Return a matrix packed, or an empty array where there is none."""
        return self.arena.take(0) if matrix is None else self.matrix(matrix)

    def _take(self, *shape: int) -> np.ndarray:
        return self.arena.take(*shape, dtype=KINDS[self.dtype])

    def _fill(self, place: np.ndarray, matrix: torch.Tensor) -> None:
        """Write a matrix to its panels at once: its rows are the columns of a panel."""
        if self.dtype is torch.bfloat16:
            matrix = matrix.bfloat16().view(torch.int16)
            place = place.view(np.int16).reshape(*place.shape[:-1], LANES, 2).swapaxes(-1, -2)
        else:
            place = place[..., None, :]
        columns = matrix.numpy().swapaxes(-1, -2)  # [..., in, out]
        parts, width = place.shape[-2:]
        for number in range(panels_of(matrix.shape[-2]) * parts):
            own = columns[..., number * width : (number + 1) * width]
            line = place[..., number // parts, :, number % parts, :]
            line[..., : own.shape[-1]] = own
            line[..., own.shape[-1] :] = 0


def _keep(values: torch.Tensor | None, arena: Arena) -> np.ndarray:
    """Return a copy of a vector in the arena, empty where there is none."""
    if values is None:
        return arena.take(0)
    place = arena.take(*values.shape)
    place[...] = values.numpy()
    return place


def pack_layer(weights: LayerWeights, packer: Packer) -> PackedLayer:
    """Pack one layer; its own tensors may then be dropped."""
    arena = packer.arena
    made = (
        _keep(weights.input_norm, arena),
        packer.matrix(weights.down),
        _keep(weights.query_norm, arena),
        packer.optional(weights.query_up),
        _keep(weights.latent_norm, arena),
        packer.matrix(weights.key_up),
        packer.matrix(weights.value_up),
        packer.matrix(weights.output),
        _keep(weights.post_norm, arena),
        Packer(arena, torch.float32).optional(weights.router),
        _keep(weights.router_bias, arena),
        packer.alternating(weights.gate, weights.up),
        packer.matrix(weights.expert_down),
    )
    tensors = tuple(map(torch.from_numpy, made))
    routed = 0 if weights.router is None else len(weights.router)
    counts = [routed, len(weights.gate) - routed, weights.gate.shape[1]]
    values = (*(tensor.data_ptr() for tensor in tensors), *counts)
    return PackedLayer(weights.shapes(), tensors, np.array([values], LAYER))


def table_of(layers: Sequence[PackedLayer]) -> np.ndarray:
    """Return the layers' records [layers]."""
    return np.concatenate([layer.record for layer in layers])
