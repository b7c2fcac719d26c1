"""Variants of one main layer, half of which is suspected, that plain text judges: without that
half, and with single changes undone, which name what is wrong with it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from mtp_export.verify.diagnosis.causes import decoding as causes
from mtp_export.verify.diagnosis.experts import SHARED, router_variants
from mtp_export.verify.diagnosis.halves import ATTENTION, FEED_FORWARD, SIZES, Suspect
from mtp_export.verify.diagnosis.leanings import Leaning, ScaledExperts
from mtp_export.verify.diagnosis.routing_values import routing_variants
from mtp_export.verify.diagnosis.tensor_variants import (
    MORE_SIZES,
    SCREENED,
    Change,
    Place,
    decay_places,
    layer_places,
    replaced,
    tensor_variants,
    vectors,
    with_vector,
)
from mtp_export.verify.diagnosis.tensor_variants import SIZES as OF_TENSORS
from mtp_export.verify.diagnosis.variants import mixed_up
from mtp_export.verify.evidence.side_by_side import VariantsOf
from mtp_runtime.cache import CacheSpec, LayerCache
from mtp_runtime.layers.decoder_layer import DecoderLayer
from mtp_runtime.layers.moe import Moe

WORDS = {ATTENTION: "the attention", FEED_FORWARD: "the feed-forward"}
_OF_FEED_FORWARD = ("post_norm", FEED_FORWARD)
LEFT_OUT = 0.0
_MULTIPLES = (*OF_TENSORS, *MORE_SIZES)


@dataclass(frozen=True)
class LayerVariant:
    """A main model with one layer changed, None for all that can be: the change, in words that
    follow "when", and what is wrong with a bundle that is better with it. half: the part of the
    layer that is changed, "" where it is both. is_left_out: that, or an expert of it, adds
    nothing. is_of_tensor: one tensor, or one value of config.json, is changed alone. is_size: to a
    multiple. is_trained: by steps of training. is_exchange: with a layer that is changed too."""

    layer: int | None
    change: str
    cause: str
    half: str = ""
    is_left_out: bool = False
    is_of_tensor: bool = False
    is_size: bool = False
    is_trained: bool = False
    is_exchange: bool = False


Named = Iterator[tuple[LayerVariant, DecoderLayer]]


@dataclass(frozen=True)
class _Times:
    """A half of a layer that adds a multiple of what it would."""

    half: Any
    factor: float

    def new_cache(self, spec: CacheSpec) -> LayerCache:
        """Make the cache that the attention keeps."""
        cache: LayerCache = self.half.new_cache(spec)
        return cache

    def __call__(self, x: torch.Tensor, *context: object) -> torch.Tensor:
        if self.factor == LEFT_OUT:
            return torch.zeros_like(x)
        added: torch.Tensor = self.half(x, *context)
        return added * self.factor


@dataclass
class Vectors:
    """Vectors of the layers that texts are taken through, by the names of their tensors."""

    found: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)

    def watched(self, number: int, layer: DecoderLayer) -> DecoderLayer:
        """The layer as it is, whose vectors are noted."""
        self.found[number] = {place.name: values for place, values in vectors(layer)}
        return layer

    def exchanged(self, number: int, layer: DecoderLayer) -> Named:
        """Yield a layer with each of its vectors in another one's place, and that with its."""
        for place, values in vectors(layer):
            for other, theirs in self.found.items():
                wanted = theirs.get(place.name)
                if other == number or wanted is None or wanted.shape != values.shape:
                    continue
                one, two = map(causes.main_layer, sorted((number, other)))
                words = f"{place.name} of {one} and of {two}"
                variant = LayerVariant(
                    None, f"{words} are exchanged", causes.exchanged(words), is_of_tensor=True
                )
                yield variant, with_vector(layer, place, wanted)


def whole_variants(weak: Sequence[Leaning], known: Vectors) -> VariantsOf[LayerVariant]:
    """Return what yields a layer with each half halved and doubled, with each known mix-up of its
    attention undone, there and in every layer, with other values of every layer's routing, with
    changes undone of what decays are made with, with each vector halved, doubled, flat and in
    another layer's place, and without each expert that leans little to the others."""

    def variants(number: int, layer: DecoderLayer) -> Named:
        for half in WORDS:
            yield from _scaled(number, layer, half, SIZES)
        for place in (number, None):
            yield from _undone(place, _mix_ups(layer), ATTENTION)
        yield from rerouted(layer)
        decays = {place.name: place for place in decay_places(layer)}
        yield from changed_tensors(number, layer, decays.values())
        others = (place for place, _ in vectors(layer) if place.name not in decays)
        yield from changed_tensors(number, layer, others, SCREENED)
        yield from known.exchanged(number, layer)
        experts = (expert for one in weak if one.layer == number for expert in one.experts)
        yield from _without(number, layer, experts)

    return variants


def _scaled(number: int, layer: DecoderLayer, half: str, factors: Iterable[float]) -> Named:
    """Yield a layer with what a half of it adds multiplied by each of some factors."""
    where, words, part = causes.main_layer(number), WORDS[half], getattr(layer, half)
    for factor in factors:
        is_out = factor == LEFT_OUT
        done = "left out" if is_out else f"multiplied by {factor:g}"
        wrong = causes.DOES_HARM if is_out else causes.times(1 / factor)
        yield (
            LayerVariant(
                layer=number,
                change=f"{words} of {where} is {done}",
                cause=causes.of_tensor(words, where, wrong),
                half=half,
                is_left_out=is_out,
                is_size=not is_out,
            ),
            replaced(layer, (half,), _Times(part, factor)),
        )


def _without(number: int, layer: DecoderLayer, experts: Iterable[int]) -> Named:
    """Yield a layer without each of some experts."""
    where, moe = causes.main_layer(number), layer.feed_forward
    if not isinstance(moe, Moe):
        return
    for expert in experts:
        name = f"expert {expert}" if expert < moe.routed_experts else SHARED
        others = ScaledExperts(moe.experts, (expert,), LEFT_OUT)
        yield (
            LayerVariant(
                layer=number,
                change=f"{name} of {where} is left out",
                cause=causes.of_tensor(name, where, causes.DOES_HARM),
                half=FEED_FORWARD,
                is_left_out=True,
            ),
            replaced(layer, (FEED_FORWARD, "experts"), others),
        )


def variants_of(suspects: Sequence[Suspect]) -> VariantsOf[LayerVariant]:
    """Return what yields the layers of suspected halves: with the half as a whole, or an expert of
    it, changed, and with each change of a tensor undone."""

    def variants(number: int, layer: DecoderLayer) -> Named:
        halves = [one.half for one in suspects if one.layer == number]
        for half in halves:
            yield from _scaled(number, layer, half, (LEFT_OUT, *SIZES))
        if FEED_FORWARD in halves and isinstance(layer.feed_forward, Moe):
            yield from _without(number, layer, range(len(layer.feed_forward.experts)))
        yield from changed_tensors(number, layer, layer_places(layer) if halves else ())
        yield from _undone(number, _exchanges(layer) if halves else ())

    return variants


def size_variants(best: LayerVariant) -> VariantsOf[LayerVariant]:
    """Return what yields the layer of a variant that is of another size, with its half as a whole,
    or one tensor of that, at more sizes: what is off is then better than what makes up for it."""

    def variants(number: int, layer: DecoderLayer) -> Named:
        if number == best.layer:
            yield from _scaled(number, layer, best.half, (one.factor for one in MORE_SIZES))
            of_tensors = changed_tensors(number, layer, layer_places(layer), MORE_SIZES)
            yield from (one for one in of_tensors if one[0].half == best.half)

    return variants


def changed_tensors(
    number: int,
    layer: DecoderLayer,
    places: Iterable[Place],
    changes: Sequence[Change] | None = None,
    where: str = "",
) -> Named:
    """Yield a layer with each change undone, or some, of each of some of its tensors. where: the
    words for it, where it is not a main one."""
    where = where or causes.main_layer(number)
    for place, change, other in tensor_variants(layer, places, changes):
        if not change.only_last:
            done = change.done.format(f"{place.name} of {where}")
            cause = causes.of_tensor(place.name, where, change.wrong)
            variant = LayerVariant(number, done, cause, half_of(place), is_of_tensor=True)
            yield replace(variant, is_size=change in _MULTIPLES), other


def half_of(place: Place) -> str:
    """Return the part of a layer that a tensor is of."""
    return FEED_FORWARD if place.path[0] in _OF_FEED_FORWARD else ATTENTION


Exchanged = tuple[str, str, DecoderLayer]


def _undone(number: int | None, changes: Iterable[Exchanged], half: str = "") -> Named:
    """Yield the variants of a layer, or of all, that change, cause and layer stand for."""
    where = causes.EVERY_LAYER if number is None else causes.main_layer(number)
    for done, cause, other in changes:
        yield LayerVariant(number, f"{done} in {where}", cause.format(layer=where), half), other


def _mix_ups(layer: DecoderLayer) -> Iterator[Exchanged]:
    """Yield change, cause and layer of the known mix-ups of its attention."""
    for done, cause, attention in mixed_up(layer.attention):
        yield done, cause, replace(layer, attention=attention)


def rerouted(layer: DecoderLayer) -> Named:
    """Yield a layer with other values of config.json for its routing, as every layer has them."""
    for variant, other in _undone(None, _other_values(layer), FEED_FORWARD):
        yield replace(variant, is_of_tensor=True), other


def _other_values(layer: DecoderLayer) -> Iterator[Exchanged]:
    """Yield change, cause and layer of other values of config.json for its routing."""
    moe = layer.feed_forward
    if isinstance(moe, Moe):
        for done, cause, router in routing_variants(moe.router, moe.routed_experts):
            yield done, cause, replaced(layer, (FEED_FORWARD, "router"), router)


def _exchanges(layer: DecoderLayer) -> Iterator[Exchanged]:
    """Yield change, cause and layer of what takes more than one tensor."""
    if layer.input_norm is not None:
        yield (
            "the two norms are exchanged",
            causes.LAYER_NORMS_SWAPPED,
            replace(layer, input_norm=layer.post_norm, post_norm=layer.input_norm),
        )
    yield from _mix_ups(layer)
    if isinstance(layer.feed_forward, Moe):
        for done, cause, router in router_variants(layer.feed_forward.router):
            yield done, cause, replaced(layer, ("feed_forward", "router"), router)
