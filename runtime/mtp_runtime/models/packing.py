"""Layers as the compiled kernels take them: their kinds, sizes and weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import prod
from typing import cast

import torch

from mtp_kernels import decoder as kernels
from mtp_runtime.layers.decoder_layer import DecoderLayer, FeedForward
from mtp_runtime.layers.gated_delta_net import GatedDeltaNet
from mtp_runtime.layers.gqa import GatedGqa, Gqa
from mtp_runtime.layers.linear import Linear
from mtp_runtime.layers.mla import Mla, StoredHalves
from mtp_runtime.layers.moe import Mlp, Moe, SigmoidRouter, SoftmaxRouter
from mtp_runtime.layers.norm import RmsNorm
from mtp_runtime.layers.rope import Rope
from mtp_runtime.layers.tensor_parallel import ParallelMoe
from mtp_runtime.loading.on_demand import READERS, read_ahead

# Names of the parts of a layer that the kernels run.
KINDS: dict[type, str] = {
    Mla: "mla",
    Gqa: "gqa",
    GatedGqa: "gqa",
    GatedDeltaNet: "gated_delta",
    Mlp: "dense",
    SigmoidRouter: "sigmoid_moe",
    SoftmaxRouter: "softmax_moe",
}


_LEAST_AHEAD = 1 << 20  # elements of matrices that are worth a pool of threads to read


@dataclass(frozen=True)
class Rows:
    """Matrices of linears on top of each other, in some shape [..., out, in]: read when they are
    packed."""

    linears: tuple[Linear, ...]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, linear: Linear) -> Rows:
        """Take one matrix [out, in]."""
        return cls((linear,), tuple(linear.weight.shape))

    @classmethod
    def stacked(cls, linears: Sequence[Linear]) -> Rows:
        """Take equally large matrices [e, out, in]."""
        return cls(tuple(linears), (len(linears), *linears[0].weight.shape))

    def pieces(self) -> Iterator[kernels.Piece]:
        """Yield rows [n, in], of each matrix as they are stored or in float32: while some are
        packed, the next are read, unless all are so small that threads would take longer."""
        reads = [read for linear in self.linears for read in linear.reads()]
        if len(reads) == 1 or prod(self.shape) < _LEAST_AHEAD:
            yield from (read() for read in reads)
            return
        with ThreadPoolExecutor(READERS) as pool:
            yield from read_ahead(pool, lambda read: read(), reads)


@dataclass(frozen=True)
class HeadRows:
    """Rows of each head of a matrix that is absorbed, in some shape [h, out, in]."""

    halves: StoredHalves
    of_values: bool
    shape: tuple[int, ...]

    def pieces(self) -> Iterator[kernels.Piece]:
        """Yield rows [n, in] of one head after the other, in one form."""
        return self.halves.rows(of_values=self.of_values)


@dataclass(frozen=True)
class Shared:
    """Sizes, constants and rotations that the layers of one decoder share; gated delta nets rotate
    nothing."""

    config: kernels.DecoderConfig | kernels.DeltaConfig
    rope: Rope | None

    @property
    def of_attention(self) -> tuple[kernels.DecoderConfig, Rope]:
        """Config and rotations of layers that are no gated delta nets."""
        assert isinstance(self.config, kernels.DecoderConfig) and self.rope is not None
        return self.config, self.rope

    def with_routing_of(self, layer: DecoderLayer) -> Shared:
        """Note the choice of experts, which the sparse layers share."""
        feed_forward = layer.feed_forward
        if not isinstance(feed_forward, Moe | ParallelMoe):
            return self
        router = cast(SigmoidRouter | SoftmaxRouter, feed_forward.router)
        has_softmax = isinstance(router, SoftmaxRouter)
        config = replace(self.config, routing=router.routing, has_softmax=has_softmax)
        return replace(self, config=config)


def attention_of(layer: DecoderLayer) -> Mla | Gqa | GatedDeltaNet:
    """Return the attention of a layer that the kernels run."""
    assert isinstance(layer.attention, Mla | Gqa | GatedDeltaNet), "the kinds that the kernels run"
    return layer.attention


def shared_by(layer: DecoderLayer) -> Shared:
    """Return what a layer shares with others of its model, but for the choice of experts."""
    attention = attention_of(layer)
    hidden, norm_eps = len(layer.post_norm.weight), layer.post_norm.eps
    if isinstance(attention, GatedDeltaNet):
        return Shared(kernels.DeltaConfig(hidden, attention.sizes, norm_eps), None)
    config = kernels.DecoderConfig(
        hidden=hidden,
        attention=attention.sizes,
        norm_eps=norm_eps,
        softmax_scale=attention.scale,
    )
    return Shared(config, attention.rope)


def weights_of(
    layer: DecoderLayer, experts: Sequence[Mlp], like: Mlp | None = None
) -> kernels.LayerWeights:
    """Return a layer's weights with some experts, or none, as the kernels take them. like: an
    expert whose sizes they have where there are none."""
    router: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    shared_gate: torch.Tensor | None = None
    if isinstance(layer.feed_forward, Moe | ParallelMoe):
        picks = cast(SigmoidRouter | SoftmaxRouter, layer.feed_forward.router)
        router = picks.weight.t()
        bias = picks.bias if isinstance(picks, SigmoidRouter) else None
    if isinstance(layer.feed_forward, Moe):
        shared_gate = layer.feed_forward.shared_gate
    hidden = len(layer.post_norm.weight)
    gate_up: kernels.Matrix = torch.empty(0, 2, hidden)
    down: kernels.Matrix = torch.empty(0, hidden, 1)
    if like is not None:
        gate_up, down = (Rows((), (0, *one.weight.shape)) for one in (like.gate_up, like.down))
    if experts:
        gate_up = Rows.stacked([expert.gate_up for expert in experts])
        down = Rows.stacked([expert.down for expert in experts])
    return kernels.LayerWeights(
        input_norm=_weight(layer.input_norm),
        attention=attention_weights(attention_of(layer)),
        post_norm=layer.post_norm.weight,
        router=router,
        router_bias=bias,
        gate_up=gate_up,
        expert_down=down,
        shared_gate=shared_gate,
    )


def attention_weights(
    attention: Mla | Gqa | GatedDeltaNet,
) -> kernels.LatentWeights | kernels.GroupedWeights | kernels.DeltaWeights:
    """Return the weights of an attention that the kernels run."""
    if isinstance(attention, Mla):
        return latent_weights(attention)
    if isinstance(attention, Gqa):
        return grouped_weights(attention)
    return kernels.DeltaWeights(
        inputs=Rows.of(attention.inputs),
        gate_inputs=Rows.of(attention.gate_inputs),
        convolution=attention.convolution.float(),
        rate=attention.rate,
        decay_bias=attention.bias,
        value_norm=attention.norm.weight,
        output=Rows.of(attention.output),
    )


def experts_of(feed_forward: FeedForward) -> Sequence[Mlp]:
    """Return every expert; a dense MLP is one."""
    if isinstance(feed_forward, Moe):
        return tuple(feed_forward.experts.every())
    assert isinstance(feed_forward, Mlp), "the kinds that the kernels run"
    return (feed_forward,)


def latent_weights(mla: Mla) -> kernels.LatentWeights:
    """Return the weights of latent attention."""
    query_up: Rows | None = None
    if mla.query_up is not None:
        heads, (outputs, rank) = mla.sizes.heads, mla.query_up.weight.shape
        query_up = Rows((mla.query_up,), (heads, outputs // heads, rank))
    key_up, value_up = absorbed(mla)
    return kernels.LatentWeights(
        down=Rows.of(mla.down),
        query_norm=_weight(mla.query_norm),
        query_up=query_up,
        latent_norm=mla.latent_norm.weight,
        key_up=key_up,
        value_up=value_up,
        output=Rows.of(mla.output),
    )


def absorbed(mla: Mla) -> tuple[kernels.Matrix, kernels.Matrix]:
    """Return the halves of kv_b_proj: to keys [h, n, c] and to values [h, v, c]."""
    up, sizes = mla.up, mla.sizes
    if isinstance(up, StoredHalves):
        keys = HeadRows(up, of_values=False, shape=(sizes.heads, sizes.nope, sizes.latent))
        return keys, HeadRows(up, of_values=True, shape=(sizes.heads, sizes.value, sizes.latent))
    return up.key_up, up.value_up.transpose(1, 2)


def grouped_weights(gqa: Gqa) -> kernels.GroupedWeights:
    """Return the weights of attention of grouped queries."""
    return kernels.GroupedWeights(
        qkv=Rows.of(gqa.qkv),
        bias=gqa.bias,
        query_norm=_weight(gqa.query_norm),
        key_norm=_weight(gqa.key_norm),
        output=Rows.of(gqa.output),
    )


def _weight(norm: RmsNorm | None) -> torch.Tensor | None:
    return None if norm is None else norm.weight
