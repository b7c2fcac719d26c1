"""Whole layers in each other's place: two main ones, or a main one and the MTP layer's block."""

from __future__ import annotations

from collections.abc import Iterator

from mtp_export.verify.diagnosis.causes import decoding as causes
from mtp_export.verify.diagnosis.layer_variants import LayerVariant
from mtp_export.verify.evidence.side_by_side import VariantsOf
from mtp_runtime.layers.decoder_layer import DecoderLayer
from mtp_runtime.streaming import StreamedModel


def swapped_layers(streamed: StreamedModel) -> VariantsOf[LayerVariant]:
    """Return what yields each layer of a model of few, which are kept, in the place of each other
    one of its kind, and the MTP layer's block in the place of each main one."""
    layers, module = [*streamed.layers(0)], streamed.rest().mtp

    def variants(number: int, layer: DecoderLayer) -> Iterator[tuple[LayerVariant, DecoderLayer]]:
        for other, theirs in enumerate(layers):
            if other != number and _are_alike(layer, theirs):
                both = " and ".join(map(causes.main_layer, sorted((number, other))))
                yield _exchanged(both), theirs
        if module is not None and _are_alike(layer, module.layer):
            yield _exchanged(f"{causes.main_layer(number)} and {causes.MTP_BLOCK}"), module.layer

    return variants


def _exchanged(both: str) -> LayerVariant:
    return LayerVariant(None, f"{both} are exchanged", causes.exchanged(both))


def _are_alike(one: DecoderLayer, other: object) -> bool:
    """Return whether two layers have the same parts."""
    if type(one) is not type(other) or not isinstance(other, DecoderLayer):
        return False
    parts = (
        (layer.input_norm, layer.attention, layer.post_norm, layer.feed_forward)
        for layer in (one, other)
    )
    return all(type(own) is type(theirs) for own, theirs in zip(*parts, strict=True))
