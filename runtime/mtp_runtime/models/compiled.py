"""The same layers on compiled kernels: float32 on a CPU, a row's bits free of its batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch

from mtp_kernels import decoder as kernels
from mtp_kernels.batch_layout import BatchLayout
from mtp_runtime.config import Hidden, ModelConfig
from mtp_runtime.layers.linear import Linear
from mtp_runtime.layers.mla import Mla
from mtp_runtime.layers.moe import Mlp, Moe
from mtp_runtime.layers.norm import RmsNorm
from mtp_runtime.layers.rope import Rope
from mtp_runtime.models.deepseek_v3 import DecoderLayer, Layers, MtpModule, RowStep, TorchLayers

# Names that the kernels know layers by.
KINDS: dict[type, str] = {Mla: "mla", Mlp: "dense", Moe: "sigmoid_moe"}


class CompiledLayers:
    """A decoder of the kernels with the interface of Layers."""

    def __init__(self, decoder: kernels.Decoder) -> None:
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
    backend: kernels.Backend = field(default_factory=kernels.make_backend)

    def layers(self, layers: Iterable[DecoderLayer]) -> Layers:
        """Packed one by one, so that no two copies of a model are held; all have one scale."""
        config, all_packed = None, []
        for layer in layers:
            if not self.backend.runs(kind_of(layer)):
                return TorchLayers((layer, *layers), self.rope)
            config = config_of(self.config, layer.attention.scale)
            all_packed.append(self.backend.pack(weights_of(layer)))
        assert config is not None, "a model has layers"
        rope = self.rope
        decoder = self.backend.decoder(
            config, all_packed, inv_freq=rope.inverse, attention_scaling=rope.amplitude
        )
        return CompiledLayers(decoder)

    def norm(self, norm: RmsNorm) -> RowStep:
        return self.backend.norm(norm.weight, norm.eps)

    def linear(self, linear: Linear) -> RowStep:
        return self.backend.projection(_dense(linear))

    def recursion(self, module: MtpModule) -> kernels.Recursion | None:
        if not isinstance(module.layers, CompiledLayers):
            return None
        embedding_norm, hidden_norm, projection = module.inputs
        return self.backend.recursion(
            kernels.RecursionParts(
                decoder=module.layers.decoder,
                embedding=module.embedding,
                embedding_norm=embedding_norm,
                hidden_norm=hidden_norm,
                projection=projection,
                head_norm=module.head.normed,
                head=module.head.projected,
                recycles_normed=module.contract.recycled_hidden is Hidden.AFTER_NORM,
            )
        )


def kind_of(layer: DecoderLayer) -> kernels.LayerKind:
    """Return the kind of a layer; a type without a name stands for itself, and is not run."""
    types = type(layer.attention), type(layer.feed_forward)
    return kernels.LayerKind(*(KINDS.get(kind, kind.__name__) for kind in types))


def config_of(config: ModelConfig, softmax_scale: float) -> kernels.DecoderConfig:
    """Return the sizes and constants that all layers share."""
    return kernels.DecoderConfig(
        hidden=config.hidden,
        heads=config.heads,
        nope=config.nope,
        rope=config.rope.size,
        value=config.value,
        latent=config.latent,
        query_rank=config.query_rank,
        experts_per_token=config.experts_per_token,
        expert_groups=config.expert_groups,
        groups_per_token=config.groups_per_token,
        normalise_weights=config.normalise_weights,
        routed_scale=config.routed_scale,
        norm_eps=config.norm_eps,
        softmax_scale=softmax_scale,
    )


def weights_of(layer: DecoderLayer) -> kernels.LayerWeights:
    """Return a layer's weights as the kernels take them."""
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
    return kernels.LayerWeights(
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
    )


def _dense(linear: Linear) -> torch.Tensor:
    return linear.matrix(torch.float32).t()


def _weight(norm: RmsNorm | None) -> torch.Tensor | None:
    return None if norm is None else norm.weight
