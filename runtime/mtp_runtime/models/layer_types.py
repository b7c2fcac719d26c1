"""Layers by the parts of a model's description. A new part is one line here, with what loads it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mtp_checkpoints.errors import UnsupportedError
from mtp_checkpoints.families import parts
from mtp_checkpoints.families.spec import LayerSpec, ModelSpec
from mtp_runtime.layers.decoder_layer import DecoderLayer
from mtp_runtime.models.attentions import (
    check_rope,
    dense_context,
    load_gqa,
    load_mla,
    load_sparse_mla,
)
from mtp_runtime.models.feed_forwards import check_mlp, check_moe, load_mlp, load_moe
from mtp_runtime.models.layer_loader import LayerLoader


def _accept(part: Any) -> None:
    """Accept every part of a type."""


@dataclass(frozen=True)
class LayerType:
    """Layer that computes parts of one type.

    load makes it of a part, under the prefix of its modules. check raises UnsupportedError for a
    part that is not computed. usual_context: tokens of the longest context that it takes unless
    longer ones are asked for, and what bounds them.
    """

    load: Callable[[LayerLoader, Any, str], Any]
    check: Callable[[Any], None] = _accept
    usual_context: Callable[[Any], tuple[int, str]] | None = None


LAYERS: dict[type, LayerType] = {
    parts.Mla: LayerType(load_mla, check_rope),
    parts.SparseMla: LayerType(load_sparse_mla, check_rope, dense_context),
    parts.Gqa: LayerType(load_gqa, check_rope),
    parts.GatedMlp: LayerType(load_mlp, check_mlp),
    parts.Moe: LayerType(load_moe, check_moe),
}


def load_layer(loader: LayerLoader, layer: LayerSpec) -> DecoderLayer:
    """Load one layer, main or MTP."""
    attention, feed_forward = layer.attention, layer.feed_forward
    return DecoderLayer(
        input_norm=loader.norm(layer.input_norm),
        attention=LAYERS[type(attention)].load(loader, attention, layer.attention_prefix),
        post_norm=loader.norm(layer.post_norm),
        feed_forward=LAYERS[type(feed_forward)].load(
            loader, feed_forward, layer.feed_forward_prefix
        ),
    )


def parts_without_layer(spec: ModelSpec) -> list[str]:
    """Return the names of the parts that the runtime has no layer for."""
    return sorted({type(part).__name__ for part in spec.parts if type(part) not in LAYERS})


def layer_type(part: object) -> LayerType:
    """Return the layer that computes a part.

    Raises UnsupportedError for a part without one, or of a variant that is not computed.
    """
    if type(part) not in LAYERS:
        raise UnsupportedError(
            "The runtime has no layer for a part of this model",
            expected=", ".join(known.__name__ for known in LAYERS),
            found=type(part).__name__,
            todo="Export, quantization and checks of files and weights do without: verify"
            " --level weights. CONTRIBUTING.md says how to add a layer",
        )
    kind = LAYERS[type(part)]
    kind.check(part)
    return kind
