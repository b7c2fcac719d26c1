"""Whole layers in each other's place: two main ones, or a main one and the MTP layer's block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from mtp_export.verify import gates
from mtp_export.verify.diagnosis.causes import decoding as causes
from mtp_export.verify.diagnosis.halves import ATTENTION, FEED_FORWARD
from mtp_export.verify.diagnosis.layer_variants import WORDS, LayerVariant
from mtp_export.verify.diagnosis.variants import Variant, unchanged
from mtp_export.verify.evidence.side_by_side import VariantsOf
from mtp_runtime.layers.decoder_layer import DecoderLayer
from mtp_runtime.models.model import MtpModule
from mtp_runtime.streaming import StreamedModel

# The fields of a layer that are each half of it.
_HALVES = {
    ATTENTION: ("input_norm", "attention"),
    FEED_FORWARD: ("post_norm", "feed_forward"),
}


def swapped_layers(streamed: StreamedModel, half: str = "") -> VariantsOf[LayerVariant]:
    """Return what yields each layer of a model of few, which are kept, in the place of each other
    one of its kind, and the MTP layer's block in the place of each main one; half of it alone."""
    layers, module = [*streamed.layers(0)], streamed.rest().mtp
    what = f"{WORDS[half]} of " if half else ""

    def variants(number: int, layer: DecoderLayer) -> Iterator[tuple[LayerVariant, DecoderLayer]]:
        for other, theirs in enumerate(layers):
            if other != number and _are_alike(layer, theirs):
                both = " and ".join(map(causes.main_layer, sorted((number, other))))
                yield _exchanged(what + both), _with(layer, theirs, half)
        if module is not None and _are_alike(layer, module.layer):
            yield _exchanged(what + _with_block(number)), _with(layer, module.layer, half)

    return variants


def _with(layer: DecoderLayer, theirs: DecoderLayer, half: str) -> DecoderLayer:
    """Return a layer with half of another one, or the other one."""
    if not half:
        return theirs
    return replace(layer, **{name: getattr(theirs, name) for name in _HALVES[half]})


def block_variants(module: MtpModule, layers: Iterable[DecoderLayer]) -> Iterator[Variant]:
    """Yield the module with each main layer of its block's kind, or with half of it, as its
    block."""
    alike = ((n, layer) for n, layer in enumerate(layers) if _are_alike(layer, module.layer))
    for number, layer in alike:
        for half in ("", *WORDS):
            what = f"{WORDS[half]} of " if half else ""
            yield replace(
                unchanged(module),
                name=f"{what}layer {number}",
                change=f"it has {what}{causes.main_layer(number)}",
                cause=causes.exchanged(what + _with_block(number)),
                module=replace(module, layer=_with(module.layer, layer, half)),
                by_acceptance=True,
                least_rise=gates.LEAST_RISE,
                is_of_main=True,
            )


def _with_block(number: int) -> str:
    return f"{causes.main_layer(number)} and {causes.MTP_BLOCK}"


def _exchanged(both: str) -> LayerVariant:
    change, cause = f"{both} are exchanged", causes.exchanged(both)
    return LayerVariant(None, change, cause, is_exchange=True)


def _are_alike(one: DecoderLayer, other: object) -> bool:
    """Return whether two layers have the same parts."""
    if type(one) is not type(other) or not isinstance(other, DecoderLayer):
        return False
    parts = (
        (layer.input_norm, layer.attention, layer.post_norm, layer.feed_forward)
        for layer in (one, other)
    )
    return all(type(own) is type(theirs) for own, theirs in zip(*parts, strict=True))
