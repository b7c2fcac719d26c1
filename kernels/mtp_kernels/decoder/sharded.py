"""Interface of layers that several processes share, each with heads, outputs and experts of its
own: the parts that a backend is given, and the stages of a pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from mtp_kernels.batch_layout import BatchLayout
from mtp_kernels.decoder.interface import Backend, DecoderConfig, LayerWeights, Matrix


@dataclass(frozen=True)
class LayerShard:
    """One process's part of a layer that several share.

    weights: of the own heads, and of the own routed experts, none in a dense layer; the attention's
    output [n, m] has rows or columns of the whole one. shared: gate_up [1, 2*i, d] and down [n, m]
    of each shared expert, or of a dense layer's MLP.
    """

    weights: LayerWeights
    shared: tuple[tuple[Matrix, Matrix], ...]


@dataclass(frozen=True)
class Pairs:
    """Rows and experts of a sparse layer, in order of experts: the row of each pair [p], its place
    among all picks [p], and where each of some consecutive experts' pairs begin and end [e+1]."""

    rows: torch.Tensor
    places: torch.Tensor
    ends: torch.Tensor


class ShardedPass(Protocol):
    """Stages of a pass through layers of which this process has a part, called in this order for
    every layer. Whoever calls them gathers between them what other processes computed."""

    def attended(self, layer: int) -> torch.Tensor:
        """Return the values [T, h*v] that the own heads attended to; fills the layer's cache."""

    def output(self, layer: int, values: torch.Tensor) -> torch.Tensor:
        """Return values times the output projection that this part has."""

    def picked(self, layer: int) -> torch.Tensor | None:
        """Norm the rows, and return the experts [T, k] that they pick; None in a dense layer."""

    def experts(self, layer: int, pairs: Pairs) -> torch.Tensor:
        """Return the outputs [p, d] of the own experts for their pairs."""

    def add(self, x: torch.Tensor, pairs: Pairs, outputs: torch.Tensor) -> None:
        """Add the outputs [p, d] of pairs to x [T, d], each times its weight, in their order."""

    def shared_inner(self, layer: int, number: int) -> torch.Tensor:
        """Return silu(gate) * up [T, i] of a shared expert."""

    def shared_down(self, layer: int, number: int, values: torch.Tensor) -> torch.Tensor:
        """Return inner values times a shared expert's down projection that this part has."""


class ShardedDecoder(Protocol):
    """Parts of some consecutive layers."""

    config: DecoderConfig

    def __len__(self) -> int: ...

    def part(self, first: int, stop: int) -> ShardedDecoder:
        """Return layers [first, stop), at least one, as a decoder of their own."""

    def begin(
        self,
        x: torch.Tensor,
        layout: BatchLayout,
        kv_cache: torch.Tensor,
        attention_input: torch.Tensor | None = None,
    ) -> ShardedPass:
        """Begin a pass of the stream x [T, d], which its caller changes between the stages.

        kv_cache and attention_input as of Decoder; raises as Decoder does.
        """


class ShardingBackend(Backend, Protocol):
    """A backend that also runs layers of which each of several processes has a part."""

    def pack_shard(self, part: LayerShard) -> object:
        """Pack one layer's part, for sharded_decoder alone."""

    def sharded_decoder(
        self,
        config: DecoderConfig,
        layers: Sequence[object],
        *,
        inv_freq: torch.Tensor,
        attention_scaling: float,
    ) -> ShardedDecoder:
        """Join parts of layers that this backend packed; arguments as of decoder."""
