"""Variants of one main layer, half of which is suspected, that plain text judges: without that
half, and with single changes undone, which name what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mtp_export.verify.diagnosis.causes import decoding as causes
from mtp_export.verify.diagnosis.experts import router_variants
from mtp_export.verify.diagnosis.halves import ATTENTION, FEED_FORWARD, Suspect
from mtp_export.verify.diagnosis.tensor_variants import layer_places, replaced, tensor_variants
from mtp_export.verify.diagnosis.variants import in_halves, interleaved
from mtp_export.verify.evidence.side_by_side import VariantsOf
from mtp_runtime.cache import CacheSpec, LayerCache
from mtp_runtime.layers.decoder_layer import DecoderLayer
from mtp_runtime.layers.gqa import Gqa, HeadGatedGqa, SlidingGqa
from mtp_runtime.layers.mla import Mla
from mtp_runtime.layers.moe import Moe

WORDS = {ATTENTION: "the attention", FEED_FORWARD: "the feed-forward"}


@dataclass(frozen=True)
class LayerVariant:
    """A main model with one layer changed: the change, in words that follow "when", and what is
    wrong with a bundle that is better with it. is_left_out: half of the layer adds nothing."""

    change: str
    cause: str
    is_left_out: bool = False


Named = Iterator[tuple[LayerVariant, DecoderLayer]]


@dataclass(frozen=True)
class _LeftOut:
    """A half of a layer that adds nothing."""

    half: Any

    def new_cache(self, spec: CacheSpec) -> LayerCache:
        """Make the cache that the attention keeps."""
        cache: LayerCache = self.half.new_cache(spec)
        return cache

    def __call__(self, x: torch.Tensor, *context: object) -> torch.Tensor:
        return torch.zeros_like(x)


def variants_of(suspects: Sequence[Suspect]) -> VariantsOf[LayerVariant]:
    """Return what yields the layers of suspected halves: without the half, and each with one change
    undone. Sizes are not tried, which make a model more or less certain by themselves."""

    def variants(number: int, layer: DecoderLayer) -> Named:
        where = causes.main_layer(number)
        for one in (one for one in suspects if one.layer == number):
            cause = causes.of_tensor(WORDS[one.half], where, causes.DOES_HARM)
            half = _LeftOut(getattr(layer, one.half))
            other = replaced(layer, (one.half,), half)
            left_out = f"{WORDS[one.half]} of {where} is left out"
            yield LayerVariant(left_out, cause, is_left_out=True), other
        if all(one.layer != number for one in suspects):
            return
        for place, change, other in tensor_variants(layer, list(layer_places(layer))):
            if not change.is_size and not change.only_last:
                done = change.done.format(f"{place.name} of {where}")
                cause = causes.of_tensor(place.name, where, change.wrong)
                yield LayerVariant(done, cause), other
        for done, cause, other in _exchanges(layer):
            yield LayerVariant(f"{done} in {where}", cause.format(layer=where)), other

    return variants


def _exchanges(layer: DecoderLayer) -> Iterator[tuple[str, str, DecoderLayer]]:
    """Yield change, cause and layer of what takes more than one tensor."""
    if layer.input_norm is not None:
        yield (
            "the two norms are exchanged",
            causes.LAYER_NORMS_SWAPPED,
            replace(layer, input_norm=layer.post_norm, post_norm=layer.input_norm),
        )
    of_attention = _OF_ATTENTION.get(type(layer.attention))
    for done, cause, attention in () if of_attention is None else of_attention(layer.attention):
        yield done, cause, replace(layer, attention=attention)
    if isinstance(layer.feed_forward, Moe):
        for done, cause, router in router_variants(layer.feed_forward.router):
            yield done, cause, replaced(layer, ("feed_forward", "router"), router)


def _latent(attention: Mla) -> Iterator[tuple[str, str, Mla]]:
    yield "the rotary rows are interleaved", causes.ROPE_IN_HALVES, interleaved(attention)


def _grouped(attention: Gqa) -> Iterator[tuple[str, str, Gqa]]:
    yield "the rotary rows are put in halves", causes.ROPE_INTERLEAVED, in_halves(attention)
    if attention.query_norm is not None:
        swapped = replace(attention, query_norm=attention.key_norm, key_norm=attention.query_norm)
        yield "q_norm and k_norm are exchanged", causes.QUERY_AND_KEY_NORMS_SWAPPED, swapped


# By the kind of attention; of one that is not listed nothing more is tried. Gated ones have other
# rows than in_halves orders.
_OF_ATTENTION: dict[type, Callable[[Any], Iterator[tuple[str, str, Any]]]] = {
    Mla: _latent,
    Gqa: _grouped,
    SlidingGqa: _grouped,
    HeadGatedGqa: _grouped,
}
