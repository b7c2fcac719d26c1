"""Check `likelihood`: plain text under the main model, whose distribution must fit it at a
temperature near 1, and no other way to run the model may make the text likelier."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from mtp_checkpoints.errors import UnsupportedError
from mtp_checkpoints.families.released import unreleased_values
from mtp_checkpoints.tensors.bundle_folder import MAIN
from mtp_export.verify.check import WHOLE_CHECK, Item, Status, failed, judged, not_tested, passed
from mtp_export.verify.context import Context
from mtp_export.verify.diagnosis.causes import decoding as causes
from mtp_export.verify.diagnosis.halves import MOST_SUSPECTS, AddedByHalves, Suspect
from mtp_export.verify.diagnosis.layer_variants import (
    LayerVariant,
    Vectors,
    size_variants,
    variants_of,
    whole_variants,
)
from mtp_export.verify.diagnosis.leanings import Leanings
from mtp_export.verify.diagnosis.suspected import MainEvidence, MainVariant, main_variants
from mtp_export.verify.diagnosis.tensor_variants import SIZES, Place, tensor_variants
from mtp_export.verify.diagnosis.trainable import Spot, Trainable
from mtp_export.verify.diagnosis.trained import Trials
from mtp_export.verify.diagnosis.undone import undone
from mtp_export.verify.evidence.likelihood import Likelihood, chance
from mtp_export.verify.evidence.plain_text import (
    JUDGING,
    KINDS,
    MANY_PASSAGES,
    TRAINING,
    PlainTexts,
)
from mtp_export.verify.evidence.side_by_side import SideBySide, VariantsOf, among
from mtp_export.verify.evidence.statistics import Estimate
from mtp_export.verify.gates import (
    LEAST_HARM_NATS,
    LEAST_KNOWN_NATS,
    LEAST_LIKELIER_NATS,
    LEAST_RESIZED_NATS,
    LEAST_TRAINED_NATS,
    TEMPERATURES,
)
from mtp_runtime.layers.decoder_layer import DecoderLayer
from mtp_runtime.streaming import StreamedModel, open_streamed
from mtp_runtime.tokenizer import Tokenizer

CONFIDENCE = 0.98
_NO_HARM = "no layer of the main model does harm"
_NO_GAIN = "no part of the main model gains by training"
# Of a model that is trained, its stored tensors: in float32, with gradients, eight times as many.
MOST_TRAINED_BYTES = 256 << 20
LEAST_TEXTS = 16  # to train on, and to judge by
MOST_UNDONE = 3  # tensors whose changes are undone
# Of a model of more layers, halves that lean to nothing are looked into alone.
MOST_LAYERS = 8


@dataclass(frozen=True)
class Likelier:
    """A variant of the main model, and the gain of plain text under it, in nats per token."""

    variant: MainVariant
    gain: Estimate

    @property
    def better(self) -> bool:
        """True where plain text is likelier, by the interval; of what something else proves, where
        it is not less likely."""
        low, high = self.gain.low, self.gain.high
        if self.variant.is_proven:
            return high is None or high >= 0
        return low is not None and low > 0 and self.gain.value > LEAST_LIKELIER_NATS

    @property
    def explained(self) -> str:
        """The finding as a sentence."""
        variant = self.variant
        if variant.is_proven:
            return variant.cause
        return causes.likelier(variant.cause, self.gain.value, variant.change)

    def is_as_good_as(self, best: Likelier) -> bool:
        """True where the intervals of the gains overlap, or something else proves it too."""
        highest, lowest = self.gain.high, best.gain.low
        if self.variant.is_proven or highest is None or lowest is None:
            return True
        return highest >= lowest


def run(context: Context) -> Iterator[Item]:
    """The temperature of plain text, then variants of the main model that there is a reason for."""
    main = context.main
    assert main is not None, "a model that is run has a main part"
    tokenizer = Tokenizer.find(main.folder)
    if not tokenizer.found:
        yield not_tested(WHOLE_CHECK, "there is no tokenizer to read plain text with")
        return
    plain = PlainTexts.of(tokenizer)
    streamed = open_streamed(context.folder, context.options.device, context.mtp_folder)
    leanings, halves, vectors = Leanings(plain.texts), AddedByHalves(), Vectors()

    def watched(number: int, layer: DecoderLayer) -> DecoderLayer:
        layer = leanings.watched(number, vectors.watched(number, layer))
        return halves.watched(number, layer)

    title = "likelihood, plain text"
    with context.show_count(title, streamed.config.layers, "layers") as advance:
        own = Likelihood.of(streamed, plain, layer_of=watched, advance=advance)
    suspects = halves.suspects(plain, own.states, streamed.rest().head)
    layers, temperature = _Layers(streamed, plain, tokenizer, vectors, context), _temperature(own)
    is_known = _is_known(own, streamed)
    if not is_known or temperature.status is Status.FAIL:
        norm = _last_norm(own, streamed)
        if norm.status is Status.FAIL:  # of which all else would be the consequence
            yield norm
            return
    if not is_known:
        item = layers.no_harm(suspects)
        why = "the model finds plain text no likelier than chance does"
        yield item if item.status is Status.FAIL else not_tested(WHOLE_CHECK, why)
        return
    yield temperature
    item = _none_better(own, _evidence(context, streamed, leanings), context)
    yield item
    if item.status is not Status.FAIL:  # of which a bad half would be the consequence
        item = layers.judged(suspects, leanings)
        yield item
        if item.status is not Status.FAIL and streamed.config.layers <= MOST_LAYERS:
            yield layers.none_gains()


def _evidence(context: Context, streamed: StreamedModel, leanings: Leanings) -> MainEvidence:
    """Evidence of the main model before anything is undone."""
    layout = next(layout for layout in context.layouts if layout.name == MAIN)
    config = layout.checkpoint.config
    found = unreleased_values(config, layout.stored.family)
    released = {one.field: one.released for one in found}
    return MainEvidence(streamed, config=config, unreleased=released, leanings=leanings)


def _temperature(own: Likelihood) -> Item:
    """One kind of text at least is likeliest at a temperature near 1: a model may be too certain of
    what it was not trained on."""
    low, high = TEMPERATURES
    found = {kind: own.temperature(kind) for kind in KINDS}
    least, most = min(found.values()), max(found.values())
    return judged(
        "temperature of plain text",
        holds=most >= low and least <= high,
        cause=causes.temperature_off(least, most),
        figure=", ".join(f"{value:.2f} ({kind})" for kind, value in found.items()),
        bound=f"{low:g} to {high:g}, of one kind at least",
        data={"temperatures": found},
    )


def _none_better(own: Likelihood, evidence: MainEvidence, context: Context) -> Item:
    """No variant of the main model makes plain text likelier, nor does what it adds prove one."""
    name = "no undone fault betters the main model"
    layers, tried = evidence.streamed.config.layers, list[Likelier]()
    for variant in main_variants(evidence):
        title = f"likelihood, when {variant.change}"
        with context.show_count(title, layers, "layers") as advance:
            other = Likelihood.of(
                variant.streamed, own.plain, layer_of=variant.layer_of, advance=advance
            )
        tried.append(Likelier(variant, own.gain(other, CONFIDENCE)))
    tried.sort(key=lambda one: -one.gain.value)
    bound = f"none of {len(tried)} gains {LEAST_LIKELIER_NATS} nats by its interval"
    if not tried:
        return passed(name, figure="nothing to be undone", bound=bound)
    best = tried[0]
    figure = f"{best.gain.value:+.3f} nats when {best.variant.change}"
    better = [one for one in tried if one.better]
    if not better:
        return passed(name, figure=figure, bound=bound)
    cause = causes.one_of([one.explained for one in better if one.is_as_good_as(better[0])])
    data = undone((one.variant.change, one.gain) for one in tried)
    return failed(name, cause, figure=figure, bound=bound, data=data)


@dataclass(frozen=True)
class Changed:
    """A main model with one layer changed, the likelihood of texts under it, and its gain."""

    variant: LayerVariant
    under: Likelihood
    gain: Estimate

    @property
    def better(self) -> bool:
        """True where the texts are likelier by far, and by the interval."""
        low = self.gain.low
        return low is not None and low > 0 and self.gain.value > LEAST_HARM_NATS

    @property
    def may_be_better(self) -> bool:
        """True where the interval leaves room for that."""
        high = self.gain.high
        return high is not None and high > LEAST_HARM_NATS and self.gain.value > 0

    @property
    def gains_by_training(self) -> bool:
        """True where other texts are likelier than training makes a good model's, by the
        interval."""
        low = self.gain.low
        return low is not None and low > 0 and self.gain.value > LEAST_TRAINED_NATS

    @property
    def is_far(self) -> bool:
        """True for a gain that makes a layer suspected that nothing else does."""
        variant = self.variant
        is_told = variant.is_left_out or variant.is_of_tensor
        return is_told or self.gain.value > LEAST_RESIZED_NATS

    def is_told_from(self, best: Changed) -> bool:
        """True for one that is less than another, text by text."""
        found = self.under.fitted_gain(best.under, CONFIDENCE)
        return found is not None and found.low is not None and found.low > 0


@dataclass(frozen=True)
class _Layers:
    """Layers of a main model, changed one at a time and compared on plain text."""

    streamed: StreamedModel
    plain: PlainTexts
    tokenizer: Tokenizer
    vectors: Vectors
    context: Context

    def judged(self, suspects: Sequence[Suspect], leanings: Leanings) -> Item:
        """No suspected half does harm, nor any of a model of few layers, nor is a known mix-up in
        every layer of that."""
        item = self.no_harm(suspects)
        if item.status is Status.FAIL or self.streamed.config.layers > MOST_LAYERS:
            return item
        title = "likelihood, with halves of layers changed"
        tried = self._tried(whole_variants(leanings.weak, self.vectors), title)
        far = [one for one in tried if one.better and one.is_far]
        if far and far[0].variant.layer is None:
            least = LEAST_HARM_NATS if far[0].variant.is_of_tensor else LEAST_RESIZED_NATS
            bound = f"none of {len(tried)} gains {least} nats by its interval"
            return _explained(_NO_HARM, tried, far, bound)
        variants = (one.variant for one in far)
        found = dict.fromkeys((o.layer, o.half) for o in variants if o.layer is not None)
        return self.no_harm([Suspect(*place, cosine=0.0) for place in found][:MOST_SUSPECTS])

    def no_harm(self, suspects: Sequence[Suspect]) -> Item:
        """No half of a layer that is suspected is better left out, or with a change undone."""
        if not suspects:
            return passed(
                _NO_HARM, figure="none is suspected", bound="leans towards those after it"
            )
        where = " and ".join(map(causes.main_layer, sorted({one.layer for one in suspects})))
        title = f"likelihood, with changes of {where} undone"
        tried = self._tried(variants_of(suspects), title)
        better = [one for one in tried if one.better]
        if better and better[0].variant.is_size:
            tried = _best_first([*tried, *self._tried(size_variants(better[0].variant), title)])
            better = [one for one in tried if one.better]
        bound = f"none of {len(tried)} gains {LEAST_HARM_NATS} nats by its interval"
        if not better or not _is_known(better[0].under, self.streamed):
            figure = f"{len(suspects)} suspected, none better otherwise"
            return passed(_NO_HARM, figure=figure, bound=bound)
        return _explained(_NO_HARM, tried, better, bound)

    def none_gains(self) -> Item:
        """No part of a layer gains by training alone what a good one does not; where one does, its
        tensors are trained each alone, and changes of the best ones undone."""
        streamed, size = self.streamed, self.streamed.opened.size_bytes
        if size > MOST_TRAINED_BYTES:
            why = f"models of more than {MOST_TRAINED_BYTES >> 20} MiB are not trained"
            return not_tested(_NO_GAIN, why)
        try:
            model = Trainable.of(streamed)
        except UnsupportedError as error:
            return not_tested(_NO_GAIN, str(error))
        texts = (PlainTexts.of_modules(self.tokenizer, names) for names in (TRAINING, JUDGING))
        trials = Trials(model, *texts)
        if min(len(trials.code.kinds), len(trials.judging.kinds)) < LEAST_TEXTS:
            return not_tested(_NO_GAIN, "this Python has no source of its standard library")
        title = "likelihood, with parts of layers trained"
        with self.context.show_count(title, len(trials.halves), "parts") as advance:
            halves = []
            for half in trials.halves:
                halves.append(trials.trained_half(half))
                advance(1)
        tried = _compared(trials.own, halves)
        bound = f"none of {len(tried)} gains {LEAST_TRAINED_NATS} nats by its interval"
        far = [one for one in tried if one.gains_by_training]
        if not far:
            figure = f"{tried[0].gain.value:+.3f} nats when {tried[0].variant.change}"
            return passed(_NO_GAIN, figure=figure, bound=bound)
        alone = self._alone(trials, far[0].variant)
        better = [one for one in alone if one.gain.low is not None and one.gain.low > 0]
        return _explained(_NO_GAIN, [*alone, *tried], better or far, bound)

    def _alone(self, trials: Trials, best: LayerVariant) -> list[Changed]:
        """Each tensor of the best part trained alone, and changes of the best tensors undone, best
        first."""
        assert best.layer is not None, "a part of one layer is trained"
        spots = trials.halves[best.layer, best.half]
        title = "likelihood, with single tensors trained"
        found = dict[LayerVariant, tuple[Spot, Likelihood]]()
        with self.context.show_count(title, len(spots), "tensors") as advance:
            for spot in spots:
                variant, under = trials.trained(spot)
                found[variant] = spot, under
                advance(1)
        trained = _compared(trials.own, ((one, under) for one, (_, under) in found.items()))
        first = [found[one.variant][0] for one in trained[:MOST_UNDONE]]
        changed = (one for spot in first for one in trials.undone(spot))
        return _best_first([*trained, *_compared(trials.own, changed)])

    def _tried(self, variants: VariantsOf[LayerVariant], title: str) -> list[Changed]:
        """Variants of layers, compared on the code with the model as it is, best first. Of a model
        of few layers those that may be better on some of it alone, of the many, on more of it."""
        if self.streamed.config.layers > MOST_LAYERS:
            return self._on(self.plain.code(), variants, title)
        some, more = (PlainTexts.of(self.tokenizer, many).code() for many in (0, MANY_PASSAGES))
        tried = self._on(some, variants, title)
        close = {one.variant for one in tried if one.may_be_better}
        return self._on(more, among(variants, close), f"{title}, on more text") if close else tried

    def _on(
        self, plain: PlainTexts, variants: VariantsOf[LayerVariant], title: str
    ) -> list[Changed]:
        with self.context.show_count(title, self.streamed.config.layers, "layers") as advance:
            found = SideBySide.of(self.streamed, plain, variants, advance)
        return _compared(found.own, found.tried)


def _last_norm(own: Likelihood, streamed: StreamedModel) -> Item:
    """No change of the last norm makes the texts likelier in the same last states; its size is not
    tried, which the temperature shows."""
    head, norm = streamed.rest().head, Place(causes.LAST_NORM, ("norm",))
    others = (
        (
            LayerVariant(
                layer=streamed.config.layers,
                change=change.done.format(norm.name),
                cause=causes.of_tensor(norm.name, "", change.wrong),
            ),
            Likelihood.of_states(own.states, other, own.plain),
        )
        for _, change, other in tensor_variants(head, [norm])
        if change not in SIZES
    )
    tried = _compared(own, others)
    name, bound = "no change of the last norm betters it", f"gains {LEAST_HARM_NATS} nats at most"
    better = [one for one in tried if one.better and _is_known(one.under, streamed)]
    return _explained(name, tried, better, bound) if better else passed(name, bound=bound)


def _compared(own: Likelihood, others: Iterable[tuple[LayerVariant, Likelihood]]) -> list[Changed]:
    """Variants compared with the model as it is, each at its temperature, best first."""
    gains = ((one, text, own.fitted_gain(text, CONFIDENCE)) for one, text in others)
    return _best_first(Changed(one, text, gain) for one, text, gain in gains if gain is not None)


def _best_first(tried: Iterable[Changed]) -> list[Changed]:
    return sorted(tried, key=lambda one: -one.gain.value)


def _explained(name: str, tried: Sequence[Changed], better: Sequence[Changed], bound: str) -> Item:
    """The failure that those that are better explain."""
    best = better[0]
    figure = f"{best.gain.value:+.3f} nats when {best.variant.change}"
    explained = causes.one_of([one.variant.cause for one in _explaining(better)])
    cause = causes.likelier(explained, best.gain.value, best.variant.change)
    data = undone((one.variant.change, one.gain) for one in tried)
    return failed(name, cause, figure=figure, bound=bound, data=data)


def _explaining(better: Sequence[Changed]) -> Sequence[Changed]:
    """Those that are not told from the best, what is left out first: any other change of a half
    that does harm may be better by chance."""
    equal = [one for one in better if one is better[0] or not one.is_told_from(better[0])]
    return sorted(equal, key=lambda one: not one.variant.is_left_out)


def _is_known(text: Likelihood, streamed: StreamedModel) -> bool:
    """True where the model finds texts of a kind likelier than chance does."""
    return max(text.per_token(KINDS[0])) >= chance(streamed.config.vocab) + LEAST_KNOWN_NATS
