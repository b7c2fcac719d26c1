"""Packing of a decoder layer's weights for compiled code: panels of 32 outputs, one copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

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


def sizes_of(config: DecoderConfig) -> Sizes:
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
    )


def pack(matrix: torch.Tensor, arena: Arena) -> np.ndarray:
    """Return [..., out, in] as panels [..., out / 32, in, 32], the last one filled with zeros."""
    *several, rows, columns = matrix.shape
    place = arena.take(*several, panels_of(rows), columns, PANEL)
    _fill(place, matrix)
    return place


def _fill(place: np.ndarray, matrix: torch.Tensor) -> None:
    """Write a matrix to its panels at once: its rows are the columns of a panel."""
    columns = matrix.numpy().swapaxes(-1, -2)  # [..., in, out]
    for panel in range(panels_of(matrix.shape[-2])):
        own = columns[..., panel * PANEL : (panel + 1) * PANEL]
        place[..., panel, :, : own.shape[-1]] = own
        place[..., panel, :, own.shape[-1] :] = 0.0


def pack_layer(weights: LayerWeights, arena: Arena) -> PackedLayer:
    """Pack one layer into an arena; its own tensors may then be dropped."""
    made = (
        _keep(weights.input_norm, arena),
        pack(weights.down, arena),
        _keep(weights.query_norm, arena),
        _optional(weights.query_up, arena),
        _keep(weights.latent_norm, arena),
        pack(weights.key_up, arena),
        pack(weights.value_up, arena),
        pack(weights.output, arena),
        _keep(weights.post_norm, arena),
        _optional(weights.router, arena),
        _keep(weights.router_bias, arena),
        _pack_alternating(weights.gate, weights.up, arena),
        pack(weights.expert_down, arena),
    )
    tensors = tuple(map(torch.from_numpy, made))
    routed = 0 if weights.router is None else len(weights.router)
    counts = [routed, len(weights.gate) - routed, weights.gate.shape[1]]
    values = (*(tensor.data_ptr() for tensor in tensors), *counts)
    return PackedLayer(weights.shapes(), tensors, np.array([values], LAYER))


def table_of(layers: Sequence[PackedLayer]) -> np.ndarray:
    """Return the layers' records [layers]."""
    return np.concatenate([layer.record for layer in layers])


def _pack_alternating(gate: torch.Tensor, up: torch.Tensor, arena: Arena) -> np.ndarray:
    """Return panels [e, panel, 2, d, 32] of gate and up in turn."""
    experts, rows, columns = gate.shape
    place = arena.take(experts, panels_of(rows), 2, columns, PANEL)
    _fill(place[:, :, 0], gate)
    _fill(place[:, :, 1], up)
    return place


def _keep(values: torch.Tensor | None, arena: Arena) -> np.ndarray:
    if values is None:
        return arena.take(0)
    place = arena.take(*values.shape)
    place[...] = values.numpy()
    return place


def _optional(matrix: torch.Tensor | None, arena: Arena) -> np.ndarray:
    return arena.take(0) if matrix is None else pack(matrix, arena)
