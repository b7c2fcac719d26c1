"""Check `likelihood`: plain text under the main model, whose distribution must fit it at a
temperature near 1, and no other way to run the model may make the text likelier."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from mtp_checkpoints.families.released import released_values, unreleased_values
from mtp_checkpoints.tensors.bundle_folder import MAIN
from mtp_export.verify.check import (
    UNDONE,
    WHOLE_CHECK,
    Item,
    Status,
    failed,
    judged,
    not_tested,
    passed,
)
from mtp_export.verify.context import Context
from mtp_export.verify.decoding.changed import (
    AS_MUCH,
    CONFIDENCE,
    Changed,
    best_first,
    compared,
    explained,
    leaves_out,
)
from mtp_export.verify.decoding.training import LEAST_TEXTS, beside, none_gains, stands_out
from mtp_export.verify.decoding.training import NAME as TRAINED
from mtp_export.verify.diagnosis.causes import decoding as causes
from mtp_export.verify.diagnosis.halves import MOST_SUSPECTS, AddedByHalves, Suspect
from mtp_export.verify.diagnosis.layer_variants import (
    WORDS,
    LayerVariant,
    Vectors,
    size_variants,
    variants_of,
    whole_variants,
)
from mtp_export.verify.diagnosis.leanings import Leanings
from mtp_export.verify.diagnosis.suspected import MainEvidence, MainVariant, main_variants
from mtp_export.verify.diagnosis.swapped_layers import swapped_layers
from mtp_export.verify.diagnosis.tensor_variants import NEGATED, SIZES, Place, tensor_variants
from mtp_export.verify.diagnosis.undone import undone
from mtp_export.verify.evidence.likelihood import Likelihood, chance
from mtp_export.verify.evidence.plain_text import (
    JUDGING,
    KINDS,
    MANY_PASSAGES,
    PlainTexts,
)
from mtp_export.verify.evidence.side_by_side import SideBySide, VariantsOf, among, joined
from mtp_export.verify.evidence.statistics import Estimate
from mtp_export.verify.gates import (
    LEAST_GUESSED_NATS,
    LEAST_HARM_NATS,
    LEAST_KNOWN_NATS,
    LEAST_LIKELIER_NATS,
    LEAST_RESIZED_NATS,
    TEMPERATURES,
)
from mtp_runtime.layers.decoder_layer import DecoderLayer
from mtp_runtime.layers.norm import RmsNorm
from mtp_runtime.streaming import StreamedModel, open_streamed
from mtp_runtime.tokenizer import Tokenizer

_HEAD = "the head (lm_head)"
_NO_HARM = "no layer of the main model does harm"
# Of a model of more layers, halves that lean to nothing are looked into alone.
MOST_LAYERS = 8
# Short texts on which a guess is tried first, and passages of each of some modules that judge it.
GUESSED_ON, GUESSED_PASSAGES = 8, 2
MOST_WEIGHED = 4  # variants that are compared with what training betters


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
        least = LEAST_GUESSED_NATS if self.variant.is_guessed else LEAST_LIKELIER_NATS
        return low is not None and low > 0 and self.gain.value > least

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
        if item.status is not Status.FAIL and streamed.config.layers <= MOST_LAYERS:
            item = layers.swapped() or stands_out(streamed, tokenizer, context) or item
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
            yield from _trained(own, streamed, tokenizer, context)


def _trained(
    own: Likelihood, streamed: StreamedModel, tokenizer: Tokenizer, context: Context
) -> Iterator[Item]:
    """Yield what training tells; in its place a change of the last norm that gains more, for which
    a trained embedding or head makes up."""
    for item in none_gains(streamed, tokenizer, context):
        if item.name == TRAINED and item.status is Status.FAIL:
            norm = _last_norm(own, streamed)
            told = norm.status is Status.FAIL and _gain(norm) > (1 + AS_MUCH) * _gain(item)
            yield norm if told else item
        else:
            yield item


def _gain(failure: Item) -> float:
    """The most, in nats, that anything undone gains of what a failure shows."""
    found: float = failure.data[UNDONE][0]["gain"]["value"]
    return found


def _evidence(context: Context, streamed: StreamedModel, leanings: Leanings) -> MainEvidence:
    """Evidence of the main model before anything is undone."""
    layout = next(layout for layout in context.layouts if layout.name == MAIN)
    config = layout.checkpoint.config
    found = unreleased_values(config, layout.stored.family)
    unreleased = {one.field: one.released for one in found} if released_values(config) else None
    return MainEvidence(streamed, config=config, unreleased=unreleased, leanings=leanings)


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
    tried = [
        Likelier(one, _gain_of(one, own, evidence, context)) for one in main_variants(evidence)
    ]
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


def _gain_of(
    variant: MainVariant, own: Likelihood, evidence: MainEvidence, context: Context
) -> Estimate:
    """The gain of plain text under a variant; on passages of modules of one in doubt, and of a
    guess that gains. Where a guess gains nothing on less text, the gain there: short texts that
    begin alike may gain together."""
    some = own.first(GUESSED_ON) if variant.is_guessed else own
    gain = some.gain(_under(variant, some.plain, context), CONFIDENCE)
    if variant.is_guessed and gain.value > 0:
        gain = own.gain(_under(variant, own.plain, context), CONFIDENCE)
    if variant.is_proven or Likelier(variant, gain).better != variant.is_guessed:
        return gain
    tokenizer = Tokenizer.find(evidence.streamed.opened.folder)
    passages = PlainTexts.of_modules(tokenizer, JUDGING, GUESSED_PASSAGES)
    if len(passages.kinds) < LEAST_TEXTS:  # of a Python without its sources
        return replace(gain, low=None)
    unchanged = Likelihood.of(evidence.streamed, passages)
    return unchanged.gain(_under(variant, passages, context), CONFIDENCE)


def _under(variant: MainVariant, plain: PlainTexts, context: Context) -> Likelihood:
    title = f"likelihood, when {variant.change}"
    with context.show_count(title, variant.streamed.config.layers, "layers") as advance:
        return Likelihood.of(variant.streamed, plain, layer_of=variant.layer_of, advance=advance)


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
        whole = whole_variants(leanings.weak, self.vectors)
        tried = self._tried(joined(whole, swapped_layers(self.streamed)), title)
        tried = self._with_halves(tried)
        far = [one for one in tried if one.better and one.is_far]
        if far and far[0].variant.layer is None:
            least = LEAST_HARM_NATS if far[0].variant.is_of_tensor else LEAST_RESIZED_NATS
            bound = f"none of {len(tried)} gains {least} nats by its interval"
            return explained(_NO_HARM, tried, far, bound)
        variants = (one.variant for one in far)
        found = dict.fromkeys((o.layer, o.half) for o in variants if o.layer is not None)
        return self.no_harm([Suspect(*place, cosine=0.0) for place in found][:MOST_SUSPECTS])

    def swapped(self) -> Item | None:
        """Return the failure of two layers in whose places the other one lies, of a model of few
        that knows text once they are put right; None of any other."""
        tried = self._tried(swapped_layers(self.streamed), "likelihood, with layers exchanged")
        tried = self._with_halves(tried)
        better = [one for one in tried if one.better and _is_known(one.under, self.streamed)]
        bound = f"none of {len(tried)} gains {LEAST_HARM_NATS} nats by its interval"
        return explained(_NO_HARM, tried, better, bound) if better else None

    def _with_halves(self, tried: list[Changed]) -> list[Changed]:
        """Those that were tried, best first; halves of layers exchanged alone, too, where whole
        ones are best."""
        if not (tried and tried[0].better and tried[0].variant.is_exchange):
            return tried
        halves = joined(*(swapped_layers(self.streamed, half) for half in WORDS))
        found = self._tried(halves, "likelihood, with halves of layers exchanged")
        return best_first([*tried, *found])

    def no_harm(self, suspects: Sequence[Suspect]) -> Item:
        """No half of a layer that is suspected is better left out, or with a change undone."""
        if not suspects:
            return passed(
                _NO_HARM, figure="none is suspected", bound="leans towards those after it"
            )
        where = " and ".join(map(causes.main_layer, sorted({one.layer for one in suspects})))
        title = f"likelihood, with changes of {where} undone"
        variants = variants_of(suspects)
        tried = self._tried(variants, title)
        better = [one for one in tried if one.better]
        if better and better[0].variant.is_size:
            sizes = size_variants(better[0].variant)
            variants = joined(variants, sizes)
            tried = best_first([*tried, *self._tried(sizes, title)])
            better = [one for one in tried if one.better]
        bound = f"none of {len(tried)} gains {LEAST_HARM_NATS} nats by its interval"
        if not better or not _is_known(better[0].under, self.streamed):
            figure = f"{len(suspects)} suspected, none better otherwise"
            return passed(_NO_HARM, figure=figure, bound=bound)
        weighed = self._beside_training(variants, better)
        more = [one for one in weighed if one.gain.low is not None and one.gain.low > 0]
        return explained(_NO_HARM, [*more, *tried], more or better, bound)

    def _beside_training(
        self, variants: VariantsOf[LayerVariant], better: Sequence[Changed]
    ) -> list[Changed]:
        """Those that are best, beside what training betters in the half of the best one: a change
        may make up for other damage."""
        best, some = better[0].variant, {one.variant for one in better[:MOST_WEIGHED]}
        if self.streamed.config.layers > MOST_LAYERS or best.layer is None:
            return []
        half = (best.layer, best.half)
        return beside(
            self.streamed,
            self.tokenizer,
            self.context,
            half,
            among(variants, some),
            is_left_out=leaves_out(better),
        )

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
        return compared(found.own, found.tried)


def _last_norm(own: Likelihood, streamed: StreamedModel) -> Item:
    """No change of the last norm makes the texts likelier in the same last states; its size is not
    tried, which the temperature shows."""
    head, norm = streamed.rest().head, Place(causes.LAST_NORM, ("norm",))
    others = (
        (
            LayerVariant(
                layer=streamed.config.layers,
                change=change.done.format(name),
                cause=causes.of_tensor(name, "", change.wrong),
            ),
            Likelihood.of_states(own.states, other, own.plain),
        )
        for _, change, other in tensor_variants(head, [norm])
        if change not in SIZES
        for name in [_HEAD if change is NEGATED and _is_positive(head.norm) else norm.name]
    )
    tried = compared(own, others)
    name, bound = "no change of the last norm betters it", f"gains {LEAST_HARM_NATS} nats at most"
    better = [one for one in tried if one.better and _is_known(one.under, streamed)]
    return explained(name, tried, better, bound) if better else passed(name, bound=bound)


def _is_positive(norm: RmsNorm) -> bool:
    """True where it is the head that has the wrong sign: with the norm's, the same follows."""
    return not norm.offset and float((norm.weight > 0).float().mean()) > 0.5


def _is_known(text: Likelihood, streamed: StreamedModel) -> bool:
    """True where the model finds texts of a kind likelier than chance does."""
    return max(text.per_token(KINDS[0])) >= chance(streamed.config.vocab) + LEAST_KNOWN_NATS
