"""The same layers on compiled kernels: float32 on a CPU, a row's bits free of its batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import torch

from mtp_kernels.batch_layout import BatchLayout
from mtp_kernels.decoder import (
    Arena,
    Decoder,
    LayerWeights,
    Norm,
    PackedLayer,
    Projection,
    Recursion,
    Sizes,
    pack_layer,
)
from mtp_runtime.config import Hidden, ModelConfig
from mtp_runtime.layers.linear import Linear
from mtp_runtime.layers.moe import Mlp, Moe
from mtp_runtime.layers.norm import RmsNorm
from mtp_runtime.layers.rope import Rope
from mtp_runtime.models.deepseek_v3 import DecoderLayer, Layers, MtpModule, TorchLayers


class CompiledLayers:
    """A Decoder with the face of Layers."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder

    def __len__(self) -> int:
        return len(self.decoder)

    def __call__(
        self, x: torch.Tensor, kv_cache: torch.Tensor, layout: BatchLayout
    ) -> torch.Tensor:
        self.decoder(x, layout, kv_cache)
        return x

    def each(self) -> Iterator[CompiledLayers]:
        return (CompiledLayers(decoder) for decoder in self.decoder.each())


@dataclass(frozen=True)
class CompiledExecution:
    """Packs parts for the kernels; the parts themselves may then be dropped."""

    config: ModelConfig
    rope: Rope
    arena: Arena = field(default_factory=Arena)

    def layers(self, layers: Iterable[DecoderLayer]) -> Layers:
        """Packed one by one, so that no two copies of a model are held; all have one scale."""
        sizes, all_packed = None, []
        for layer in layers:
            if not isinstance(layer.feed_forward, Mlp | Moe):
                return TorchLayers((layer, *layers), self.rope)  # a layer the kernels do not know
            sizes = sizes_of(self.config, layer.attention.scale)
            all_packed.append(packed(layer, self.arena))
        assert sizes is not None, "a model has layers"
        rope = self.rope
        decoder = Decoder(sizes, all_packed, rope.inverse, rope.amplitude)
        return CompiledLayers(decoder)

    def norm(self, norm: RmsNorm) -> Norm:
        return Norm(norm.weight, norm.eps)

    def linear(self, linear: Linear) -> Projection:
        return Projection(_dense(linear), self.arena)

    def recursion(self, module: MtpModule) -> Recursion | None:
        parts = (*module.inputs, module.head.normed, module.head.projected)
        embedding_norm, hidden_norm, projection, head_norm, head = parts
        layers = module.layers
        if not isinstance(layers, CompiledLayers):
            return None
        assert isinstance(projection, Projection) and isinstance(head, Projection)
        norms = embedding_norm, hidden_norm, head_norm
        assert all(isinstance(norm, Norm) for norm in norms)
        return Recursion(
            layers.decoder,
            module.embedding,
            cast(tuple[Norm, Norm, Norm], norms),
            projection,
            head,
            module.contract.recycled_hidden is Hidden.AFTER_NORM,
        )


def sizes_of(config: ModelConfig, attention_scale: float) -> Sizes:
    """The sizes that all layers share."""
    return Sizes(
        hidden=config.hidden,
        heads=config.heads,
        nope=config.nope,
        rope=config.rope.size,
        value=config.value,
        latent=config.latent,
        query_rank=config.query_rank,
        experts_per_token=config.experts_per_token,
        groups=config.expert_groups,
        groups_per_token=config.groups_per_token,
        normalise=config.normalise_weights,
        routed_scale=np.float32(config.routed_scale),
        norm_eps=np.float32(config.norm_eps),
        attention_scale=np.float32(attention_scale),
    )


def packed(layer: DecoderLayer, arena: Arena) -> PackedLayer:
    """A layer's weights in the kernels' layout; the layer itself may then be dropped."""
    mla, feed_forward = layer.attention, layer.feed_forward
    heads = len(mla.key_up)
    router: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    if isinstance(feed_forward, Moe):
        gate_up = torch.stack([_dense(linear) for linear in feed_forward.gate_up])
        down = torch.stack([_dense(linear) for linear in feed_forward.down])
        router, bias = feed_forward.router.weight.t(), feed_forward.router.bias
    else:
        assert isinstance(feed_forward, Mlp)
        gate_up, down = _dense(feed_forward.gate_up)[None], _dense(feed_forward.down)[None]
    gate, up = gate_up.chunk(2, dim=1)
    query_up = None if mla.query_up is None else _dense(mla.query_up).contiguous()
    return pack_layer(
        LayerWeights(
            input_norm=layer.input_norm.weight,
            down=_dense(mla.down),
            query_norm=_weight(mla.query_norm),
            query_up=None if query_up is None else query_up.view(heads, -1, query_up.shape[1]),
            latent_norm=mla.latent_norm.weight,
            key_up=mla.key_up.transpose(1, 2),
            value_up=mla.value_up.transpose(1, 2),
            output=_dense(mla.output),
            post_norm=layer.post_norm.weight,
            router=router,
            router_bias=bias,
            gate=gate,
            up=up,
            expert_down=down,
        ),
        arena,
    )


def _dense(linear: Linear) -> torch.Tensor:
    return linear.matrix(torch.float32).t()


def _weight(norm: RmsNorm | None) -> torch.Tensor | None:
    return None if norm is None else norm.weight
