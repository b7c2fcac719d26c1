"""Weights of a decoder layer as a backend packs them: in memory, or read piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, fields
from typing import Any, Protocol, runtime_checkable

import torch

from mtp_kernels.quantize.row_codes import RowCodes
from mtp_kernels.sizes import Shapes

Piece = torch.Tensor | RowCodes


@runtime_checkable
class StoredMatrix(Protocol):
    """A matrix [..., out, in] that is read piece by piece while it is packed."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def pieces(self) -> Iterator[Piece]:
        """Yield rows [n, in], all of them in order, matrix after matrix, and those of a matrix in
        one form: codes, bf16 or float32."""


# In memory, or to be read.
Matrix = torch.Tensor | StoredMatrix


def pieces_of(matrix: Matrix) -> Iterator[Piece]:
    """Yield rows [n, in] of a matrix [..., out, in] in order."""
    if isinstance(matrix, torch.Tensor):
        yield matrix.flatten(0, -2)
    else:
        yield from matrix.pieces()


@dataclass(frozen=True)
class LatentWeights:
    """Weights of latent attention: matrices [out, in].

    down projects to [query or its low rank | latent | rope key]. query_norm and query_up are None
    without a query rank. w is d but in a layer without an input norm.
    """

    down: Matrix  # [query + c + r, w]
    query_norm: torch.Tensor | None  # [query_rank]
    query_up: Matrix | None  # [h, n+r, query_rank]
    latent_norm: torch.Tensor  # [c]
    key_up: Matrix  # [h, n, c], transposed a query's way into the latent space
    value_up: Matrix  # [h, v, c]
    output: Matrix  # [d, h*v]


@dataclass(frozen=True)
class GroupedWeights:
    """Weights of attention of grouped queries: matrices [out, in], g key heads of n entries.

    qkv projects to [queries | keys | values], to which bias is added; where attention is gated, a
    head's gate follows its query. w is d but in a layer without an input norm.
    """

    qkv: Matrix  # [h*n + 2*g*n, w]; gated: [2*h*n + 2*g*n, w]
    bias: torch.Tensor | None  # [rows of qkv]
    query_norm: torch.Tensor | None  # [n]
    key_norm: torch.Tensor | None  # [n]
    output: Matrix  # [d, h*n]


@dataclass(frozen=True)
class DeltaWeights:
    """Weights of a gated delta net: matrices [out, in], c channels [queries | keys | values].

    inputs project to channels and output gates z, gate_inputs to what betas are sigmoids of, and to
    decays. A value head's log decay is rate * softplus(decay + decay_bias). What a value head reads
    is normed by itself, times value_norm and silu(z).
    """

    inputs: Matrix  # [c + h*v, d]
    gate_inputs: Matrix  # [2*h, d]
    convolution: torch.Tensor  # [c, width]
    rate: torch.Tensor  # [h]
    decay_bias: torch.Tensor  # [h]
    value_norm: torch.Tensor  # [v]
    output: Matrix  # [d, h*v]


@dataclass(frozen=True)
class LayerWeights:
    """One layer's float32 tensors as a checkpoint has them: matrices [out, in].

    gate_up and expert_down hold e routed experts, then shared ones; router and router_bias are
    None in a dense layer, whose MLP is one shared expert. i is the inner size. The sigmoid of a
    row's product with shared_gate, if there is one, multiplies what shared experts make of it.
    input_norm is None in a layer whose attention is given rows [T, w] of their own, as that of an
    EAGLE-3 draft; only the first layer of a decoder may be one.
    """

    input_norm: torch.Tensor | None  # [d]
    attention: LatentWeights | GroupedWeights | DeltaWeights
    post_norm: torch.Tensor  # [d]
    router: torch.Tensor | None  # [e, d]
    router_bias: torch.Tensor | None  # [e], added to sigmoids for picking only
    gate_up: Matrix  # [e + shared, 2*i, d]
    expert_down: Matrix  # [e + shared, d, i]
    shared_gate: torch.Tensor | None = None  # [d]

    @property
    def tensors(self) -> dict[str, Any]:
        """Every tensor by its field's name, the attention's too; None where there is none."""
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        attention = own.pop("attention")
        return {field.name: getattr(attention, field.name) for field in fields(attention)} | own

    def shapes(self, absent: int = 0) -> Shapes:
        """Return the shape of every tensor by its field's name, None where there is none; of
        experts with those of some that are absent."""
        shapes: Shapes = {n: None if t is None else tuple(t.shape) for n, t in self.tensors.items()}
        for name in ("gate_up", "expert_down") if absent else ():
            number, *rest = shapes[name] or ()
            shapes[name] = (number + absent, *rest)
        return shapes


@dataclass(frozen=True)
class RoutedExperts:
    """Routed experts of a layer that stay in their files: so many, each with gate_up [1, 2*i, d]
    and down [1, d, i], which are read when they are packed. form: what experts have in common that
    take equally much memory."""

    number: int
    matrices: Callable[[int], tuple[Matrix, Matrix]]
    form: Callable[[int], Hashable]


@dataclass(frozen=True)
class OffloadedLayer:
    """A sparse layer whose routed experts are read when rows pick them; weights have the shared
    ones alone, if there are any."""

    weights: LayerWeights
    experts: RoutedExperts


@dataclass(frozen=True)
class LayerShard:
    """One process's part of a layer that several share.

    weights: of the own heads, and of the own routed experts, none in a dense layer; the attention's
    output [n, m] has rows or columns of the whole one. shared: gate_up [1, 2*i, d] and down [n, m]
    of each shared expert, or of a dense layer's MLP.
    """

    weights: LayerWeights
    shared: tuple[tuple[Matrix, Matrix], ...]
