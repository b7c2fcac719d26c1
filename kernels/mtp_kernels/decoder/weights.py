"""Packs a decoder layer's weights for the compiled kernels: panels of 32 outputs, one copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from mtp_kernels.cpu.memory import Arena
from mtp_kernels.cpu.vectors import PANEL


class Sizes(NamedTuple):
    """What all layers of a model share. query_rank 0: queries are projected in one step."""

    hidden: int
    heads: int
    nope: int
    rope: int
    value: int
    latent: int
    query_rank: int
    experts_per_token: int
    groups: int
    groups_per_token: int
    normalise: bool
    routed_scale: Any  # float32
    norm_eps: Any  # float32
    attention_scale: Any  # float32


class Layer(NamedTuple):
    """A layer as compiled code sees it: addresses of packed weights, and counts."""

    input_norm: int  # [d]
    down: int  # x to [query or its rank | latent | rope key]
    query_norm: int
    query_up: int  # by head
    latent_norm: int
    key_up: int  # by head, n to c
    value_up: int  # by head, c to v
    output: int  # h*v to d
    post_norm: int
    router: int  # d to e
    router_bias: int
    gate_up: int  # by expert, [gate, up] alternating by panel
    expert_down: int  # by expert
    routed: int  # experts to choose from, 0 in a dense layer
    shared: int  # experts behind them that every row goes through; a dense layer has one
    inner: int  # width of an expert


@dataclass(frozen=True)
class LayerWeights:
    """A layer's float32 tensors as a checkpoint has them: matrices [out, in].

    gate, up [e, i, d] and expert_down [e, d, i] hold routed experts, then shared ones; router
    [routed, d] is None in a dense layer, whose MLP is one shared expert. key_up [h, c, n],
    value_up [h, v, c] and query_up [h, n+r, q] by head, the last None without a query rank.
    """

    input_norm: torch.Tensor
    down: torch.Tensor
    query_norm: torch.Tensor | None
    query_up: torch.Tensor | None
    latent_norm: torch.Tensor
    key_up: torch.Tensor
    value_up: torch.Tensor
    output: torch.Tensor
    post_norm: torch.Tensor
    router: torch.Tensor | None
    router_bias: torch.Tensor | None
    gate: torch.Tensor
    up: torch.Tensor
    expert_down: torch.Tensor


@dataclass(frozen=True)
class PackedLayer:
    """The tensors that own a layer's memory, and the layer that points into them."""

    tensors: tuple[torch.Tensor, ...]
    layer: Layer


def pack(matrix: torch.Tensor) -> torch.Tensor:
    """[..., out, in] to panels [..., out / 32, in, 32], the last one filled up with zeros."""
    *several, rows, columns = matrix.shape
    panels = -(-rows // PANEL)
    padded = matrix.new_zeros(*several, panels * PANEL, columns, dtype=torch.float32)
    padded[..., :rows, :] = matrix
    return padded.view(*several, panels, PANEL, columns).transpose(-1, -2).contiguous()


def pack_layer(weights: LayerWeights, arena: Arena) -> PackedLayer:
    """Pack one layer into an arena; its own tensors are not needed any more."""
    gate_up = torch.stack([pack(weights.gate), pack(weights.up)], dim=2)  # [e, panel, 2, d, 32]
    made = (
        _vector(weights.input_norm),
        pack(weights.down),
        _vector(weights.query_norm),
        _optional(weights.query_up),
        _vector(weights.latent_norm),
        pack(weights.key_up),
        pack(weights.value_up),
        pack(weights.output),
        _vector(weights.post_norm),
        _optional(weights.router),
        _vector(weights.router_bias),
        gate_up,
        pack(weights.expert_down),
    )
    tensors = tuple(arena.keep(tensor) for tensor in made)
    routed = 0 if weights.router is None else len(weights.router)
    counts = [routed, len(weights.gate) - routed, weights.gate.shape[1]]
    return PackedLayer(tensors, Layer(*[tensor.data_ptr() for tensor in tensors], *counts))


def table(layers: Sequence[PackedLayer]) -> Any:
    """The layers as one array [layers, fields] of int64."""
    return np.array([layer.layer for layer in layers], np.int64)


def _vector(values: torch.Tensor | None) -> torch.Tensor:
    return torch.empty(0) if values is None else values.float().contiguous()


def _optional(matrix: torch.Tensor | None) -> torch.Tensor:
    return torch.empty(0) if matrix is None else pack(matrix)
