"""Whole layers in each other's place: two main ones, or a main one and the MTP layer's block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from mtp_export.verify import gates
from mtp_export.verify.diagnosis.causes import decoding as causes
from mtp_export.verify.diagnosis.layer_variants import LayerVariant
from mtp_export.verify.diagnosis.variants import Variant, unchanged
from mtp_export.verify.evidence.side_by_side import VariantsOf
from mtp_runtime.layers.decoder_layer import DecoderLayer
from mtp_runtime.models.model import MtpModule
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
            yield _exchanged(_with_block(number)), module.layer

    return variants


def block_variants(module: MtpModule, layers: Iterable[DecoderLayer]) -> Iterator[Variant]:
    """Yield the module with each main layer of its block's kind as its block."""
    for number, layer in enumerate(layers):
        if _are_alike(layer, module.layer):
            yield replace(
                unchanged(module),
                name=f"block of layer {number}",
                change=f"{causes.main_layer(number)} is its block",
                cause=causes.exchanged(_with_block(number)),
                module=replace(module, layer=layer),
                by_acceptance=True,
                least_rise=gates.LEAST_RISE,
                is_of_main=True,
            )


def _with_block(number: int) -> str:
    return f"{causes.main_layer(number)} and {causes.MTP_BLOCK}"


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
