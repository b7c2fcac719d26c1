"""Layers by the parts of a model's description. A new part is one line of LAYERS, with the function
that loads it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from mtp_checkpoints.errors import UnsupportedError
from mtp_checkpoints.families import parts
from mtp_checkpoints.families.sandwich_layer import SandwichLayerSpec
from mtp_checkpoints.families.spec import LayerSpec, ModelSpec
from mtp_runtime.config import ModelConfig
from mtp_runtime.layers.decoder_layer import DecoderLayer, Nothing, PostNormLayer
from mtp_runtime.layers.normed_moe import MlpBeside
from mtp_runtime.layers.sandwich_layer import PerLayerInput, SandwichLayer
from mtp_runtime.models import attention_types as attention
from mtp_runtime.models import feed_forward_types as feed_forward
from mtp_runtime.models.layer_loader import LayerLoader, Stacks

_WITHOUT = (
    "Export, quantization and checks of files and weights do without: verify --level weights."
    " CONTRIBUTING.md says how to add a layer"
)


def _accept(part: Any) -> None:
    """Accept every part of a type."""


def _nothing(part: Any) -> int:
    """Return what a part keeps that keeps nothing."""
    return 0


def _by_torch(part: Any, prefix: str, max_positions: int) -> None:
    """Have torch run layers with such a part."""


def _load_nothing(loader: LayerLoader, part: parts.Nothing, prefix: str) -> Nothing:
    return Nothing()


def _no_stacks(part: parts.Nothing, prefix: str, max_positions: int) -> Stacks:
    return ()


@dataclass(frozen=True)
class LayerType:
    """Layer that computes parts of one type.

    load makes it of a part, under the prefix of its modules. check raises UnsupportedError for a
    part that is not computed. cached: elements that it keeps of a token; state: of a sequence,
    however long it is, in float32. usual_context: tokens of the longest context that it takes
    unless longer ones are asked for, and what bounds them. stacks: modules under the prefix that
    kernels pack as one matrix, where they have one form; None where torch runs the layer, given the
    tokens of the longest context.
    """

    load: Callable[[LayerLoader, Any, str], Any]
    stacks: Callable[[Any, str, int], Stacks | None] = _by_torch
    check: Callable[[Any], None] = _accept
    cached: Callable[[Any], int] = _nothing
    state: Callable[[Any], int] = _nothing
    usual_context: Callable[[Any], tuple[int, str]] | None = None


LAYERS: dict[type, LayerType] = {
    parts.Mla: LayerType(
        attention.load_mla, attention.mla_stacks, attention.check_rope, attention.slot
    ),
    parts.SparseMla: LayerType(
        attention.load_sparse_mla,
        attention.sparse_stacks,
        attention.check_rope,
        attention.sparse_slot,
        usual_context=attention.dense_context,
    ),
    parts.Gqa: LayerType(
        attention.load_gqa, attention.gqa_stacks, attention.check_rope, attention.slot
    ),
    parts.SlidingGqa: LayerType(
        attention.load_sliding_gqa, check=attention.check_rope, cached=attention.slot
    ),
    parts.HeadGatedGqa: LayerType(
        attention.load_head_gated_gqa, check=attention.check_rope, cached=attention.slot
    ),
    parts.SharedGqa: LayerType(
        attention.load_shared_gqa, check=attention.check_rope, cached=attention.own_slot
    ),
    parts.GatedDeltaNet: LayerType(
        attention.load_gated_delta_net, attention.delta_stacks, state=attention.delta_state
    ),
    parts.Mamba2: LayerType(attention.load_mamba2, state=attention.delta_state),
    parts.PlainGqa: LayerType(attention.load_plain_gqa, cached=attention.plain_slot),
    parts.GatedMlp: LayerType(
        feed_forward.load_mlp, feed_forward.mlp_stacks, feed_forward.check_dense
    ),
    parts.Moe: LayerType(feed_forward.load_moe, feed_forward.moe_stacks, feed_forward.check_moe),
    parts.NormedMoe: LayerType(feed_forward.load_normed_moe, check=feed_forward.check_normed_moe),
    parts.UngatedMlp: LayerType(feed_forward.load_ungated_mlp),
    parts.UngatedMoe: LayerType(feed_forward.load_ungated_moe),
    parts.Nothing: LayerType(_load_nothing, _no_stacks),
}


def load_layer(loader: LayerLoader, layer: LayerSpec) -> DecoderLayer:
    """Load one layer, main or MTP."""
    if isinstance(layer, SandwichLayerSpec):
        return _load_sandwich(loader, layer)
    made = PostNormLayer if layer.norms_after else DecoderLayer
    return made(
        input_norm=loader.norm(layer.input_norm),
        attention=load_part(loader, layer.attention, layer.attention_prefix),
        post_norm=loader.norm(layer.post_norm),
        feed_forward=load_part(loader, layer.feed_forward, layer.feed_forward_prefix),
    )


def _load_sandwich(loader: LayerLoader, layer: SandwichLayerSpec) -> SandwichLayer:
    inputs, source = layer.inputs, loader.source
    own = None
    if inputs is not None:
        gate, projection, norm = (
            f"{layer.prefix}.{name}" for name in (inputs.gate, inputs.projection, inputs.norm)
        )
        own = PerLayerInput(
            inputs.index, source.linear(gate), source.linear(projection), loader.norm(norm)
        )
    input_norm, attention_norm, post_norm, output_norm = (
        loader.norm(layer.norm(number)) for number in range(4)
    )
    return SandwichLayer(
        input_norm,
        load_part(loader, layer.attention, layer.attention_prefix),
        post_norm,
        load_part(loader, layer.feed_forward, layer.feed_forward_prefix),
        attention_norm=attention_norm,
        output_norm=output_norm,
        scale=source.tensor(f"{layer.prefix}.{layer.scale}"),
        inputs=own,
        beside=None if layer.beside is None else _load_beside(loader, layer, layer.beside),
    )


def _load_beside(loader: LayerLoader, layer: SandwichLayerSpec, mlp: parts.GatedMlp) -> MlpBeside:
    return MlpBeside(load_part(loader, mlp, layer.mlp_prefix), loader.norm(layer.mlp_norm))


def load_part(loader: LayerLoader, part: object, prefix: str) -> Any:
    """Load a part of a layer, whose modules have a prefix: attention or a feed-forward."""
    return LAYERS[type(part)].load(loader, part, prefix)


def why_not_computed(spec: ModelSpec) -> str:
    """Return why the runtime does not compute a model, "" where it has a layer for every part."""
    unknown = (part for part in spec.parts if type(part) not in LAYERS)
    lacking = sorted(map(_title, unknown))
    if lacking:
        return f"it has no layer for {', '.join(lacking)}"
    return spec.uncomputed


def _title(part: object) -> str:
    return part.title if isinstance(part, parts.Listed) else type(part).__name__


def layer_type(part: object) -> LayerType:
    """Return the layer that computes a part.

    Raises UnsupportedError for a part without one, or of a variant that is not computed.
    """
    if type(part) not in LAYERS:
        raise UnsupportedError(
            "The runtime has no layer for a part of this model",
            expected=", ".join(known.__name__ for known in LAYERS),
            found=_title(part),
            todo=_WITHOUT,
        )
    kind = LAYERS[type(part)]
    kind.check(part)
    return kind


def config_for(spec: ModelSpec, tokens: int | None) -> ModelConfig:
    """Return the facts of a model for contexts of at most some tokens; None: as many as its layers
    usually take.

    Raises UnsupportedError for a part that the runtime does not compute, UsageError for more tokens
    than the model has positions.
    """
    if spec.uncomputed:
        raise UnsupportedError(
            "The runtime does not compute this model",
            found=spec.uncomputed,
            todo=_WITHOUT,
        )
    config = ModelConfig.of(spec)
    for part in spec.parts:
        usual = layer_type(part).usual_context
        if tokens is None and usual is not None:
            config = config.bounded(*usual(part))
    elements = sum(layer_type(layer.attention).state(layer.attention) for layer in spec.layers)
    config = replace(config, state_elements=elements)
    return config if tokens is None else config.for_contexts(tokens)
