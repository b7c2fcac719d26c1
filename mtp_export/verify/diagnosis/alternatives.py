"""Variants of the MTP module compared with the module as it is: one that drafts better names the
export bug that it undoes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from mtp_export.progress import CountCallback
from mtp_export.verify import gates
from mtp_export.verify.diagnosis.by_torch import by_torch
from mtp_export.verify.diagnosis.causes import decoding as causes
from mtp_export.verify.diagnosis.experts import expert_variant_count, expert_variants, has_many
from mtp_export.verify.diagnosis.layer_variants import LayerVariant
from mtp_export.verify.diagnosis.suspected import module_variants
from mtp_export.verify.diagnosis.swapped_layers import block_variants
from mtp_export.verify.diagnosis.trainable_module import changed_half
from mtp_export.verify.diagnosis.variant_drafts import (
    acceptance,
    anchors_of,
    clamped,
    fitted_scores,
    tried_drafts,
)
from mtp_export.verify.diagnosis.variants import LOADING, Variant, first_token_variant, unchanged
from mtp_export.verify.evidence.corpus import Corpus, Drafts
from mtp_export.verify.evidence.statistics import Estimate, ratio
from mtp_runtime.drafters.base import ScoredVariant, TargetDraft
from mtp_runtime.layers.decoder_layer import DecoderLayer
from mtp_runtime.teacher_forcing import (
    Anchors,
    DraftInputs,
    Texts,
    draft_states,
    overlaps,
)

# A variant is better if the target's best tokens gain this many nats, and the interval of the gain
# lies above 0. The first bound excludes variants that make no difference, the second excludes
# chance.
LEAST_GAIN_NATS = 0.03
# The share of drafts that are accepted of a variant that explains anything.
LEAST_ACCEPTED = 0.1
CONFIDENCE = 0.98
# Texts on which a variant must not be worse before it is tried on all.
_SAMPLED_TEXTS = 4
# The first tokens of each of these, which tell most variants to be worse by their interval.
_FIRST_TOKENS = 48


@dataclass(frozen=True)
class Gain(Estimate):
    """A gain, and what it is made of by text: sums in nats, and the drafts that they are of."""

    sums: tuple[float, ...] = ()
    counts: tuple[float, ...] = ()

    def is_told_from(self, best: Gain) -> bool:
        """True for one that is less than another of the same drafts, text by text."""
        lost = [one - other for one, other in zip(best.sums, self.sums, strict=True)]
        found = ratio(lost, self.counts, CONFIDENCE)
        return found is not None and found.low is not None and found.low > 0


@dataclass(frozen=True)
class Alternative:
    """A variant compared with the module as it is, at one depth.

    gain: mean log-probability of the target's best tokens, variant minus own, in nats. own and
    other: greedy acceptance of the module and of the variant, if it was computed. rise: acceptance
    of the variant minus own over the same drafts, if it was computed. is_fitted: the gain is that
    where each is at the temperature that fits it. half: of the module, if that alone is changed.
    """

    variant: Variant | ScoredVariant
    gain: Estimate
    own: float | None = None
    other: float | None = None
    rise: Estimate | None = None
    is_fitted: bool = False
    half: str = ""

    @property
    def better(self) -> bool:
        """True if the variant drafts better than the module as it is."""
        low = self.gain.low
        return low is not None and low > 0 and self.gain.value > LEAST_GAIN_NATS

    @property
    def helps(self) -> bool:
        """False where nearly every draft is still refused: the variant is less wrong by chance. Of
        the many exchanges of experts one is so at any acceptance: more must be accepted by it, and
        by far where most drafts are refused. A variant that makes drafts more certain must have
        more accepted by the interval, or gain where both are as certain as fits them."""
        if not (self.is_fitted or self.rises):
            return False
        if self.other is None or self.own is None:
            return True
        least = gates.LEAST_RISE if self.own < gates.LEAST_ACCEPTANCE else 0.0
        rises = self.other - self.own > least or isinstance(self.variant, Variant)
        return self.other >= LEAST_ACCEPTED and rises

    @property
    def rises(self) -> bool:
        """False for a variant that makes drafts more or less certain, if no more are accepted."""
        if not self.variant.by_acceptance:
            return True
        least = self.variant.least_rise if isinstance(self.variant, Variant) else 0.0
        rise = self.rise
        return bool(rise and rise.low is not None and rise.low > 0 and rise.value >= least)

    def explains_as_well_as(self, best: Alternative) -> bool:
        """True where the drafts do not tell which of the two is better."""
        own, other = self.gain, best.gain
        if isinstance(own, Gain) and isinstance(other, Gain) and own.counts == other.counts:
            return not own.is_told_from(other)
        return own.high is not None and other.low is not None and own.high >= other.low

    @property
    def kind(self) -> str:
        """LOADING or CONTRACT: what the variant undoes."""
        return self.variant.kind if isinstance(self.variant, Variant) else LOADING

    @property
    def is_of_main(self) -> bool:
        """True where the main model is as wrong."""
        return isinstance(self.variant, Variant) and self.variant.is_of_main

    @property
    def is_left_out(self) -> bool:
        """True where a half of the module's layer adds nothing."""
        return isinstance(self.variant, Variant) and self.variant.is_left_out

    @property
    def depth(self) -> int:
        """The draft, from 1, that shows the difference."""
        return self.variant.depth

    @property
    def wrong(self) -> str:
        """The fault that it undoes, whatever tensor has it: "" for any size."""
        if not isinstance(self.variant, Variant):
            return self.variant.cause
        return "" if self.variant.by_acceptance else self.variant.wrong or self.variant.cause

    @property
    def as_of_layer(self) -> LayerVariant:
        """The change as one of a layer, the module."""
        what, is_size = (self.variant.change, self.variant.cause), self.variant.by_acceptance
        return LayerVariant(0, *what, self.half, is_of_tensor=True, is_size=is_size)

    @property
    def explained(self) -> str:
        """The finding as a sentence, behind its kind."""
        if self.own is not None and self.other is not None and self.other - self.own > 0.005:
            what = f"acceptance rises from {self.own:.2f} to {self.other:.2f}"
        else:
            what = f"the drafts' log-probability rises by {self.gain.value:.2f} nats"
        at = f" at draft {self.depth}" if self.depth > 1 else ""
        more = causes.more_is_wrong(gates.LEAST_ACCEPTANCE) if self._is_not_all else ""
        return f"{self.kind}: {what}{at} when {self.variant.change}: {self.variant.cause}{more}"

    @property
    def leaves_most_refused(self) -> bool:
        """True for a change of the module's tensors by which fewer than half of the refused drafts
        are accepted, and that does not say so itself."""
        return self.kind == LOADING and not (self._is_not_all or self.mends_most)

    @property
    def mends_most(self) -> bool:
        """False for a change by which fewer than half of the refused drafts are accepted."""
        if self.own is None or self.other is None:
            return True
        return self.other - self.own >= (1 - self.own) / 2

    @property
    def _is_not_all(self) -> bool:
        """True where a module drafts too badly even so."""
        of_module = isinstance(self.variant, Variant) and self.depth == 1
        return of_module and self.other is not None and self.other < gates.LEAST_ACCEPTANCE


def alternatives(corpus: Corpus) -> list[Alternative]:
    """Every variant of the module compared with it as it is, best first; those that a sample of the
    texts shows to be worse, on the sample alone."""
    corpus = by_torch(corpus)
    module = corpus.module
    variants = [*module_variants(corpus.model, module)]
    count = len(variants) + 1
    with corpus.show_count("acceptance, with faults undone", count, "faults") as advance:
        *samples, whole = benches = _benches(corpus)
        whole.unchanged(1)
        advance(1)
        tried = []
        for variant in variants:
            tried.append(_on_more(benches, variant))
            advance(1)
    bench = samples[-1] if samples and has_many(module) else whole
    first = bench.unchanged(1)
    sampled = bench.corpus.everywhere.owners % sampling_step(bench.corpus.texts) == 0
    own = clamped(first.scores[0])
    experts = expert_variants(bench.corpus, own, own_hit=first.hit[0], sample=sampled)
    count = expert_variant_count(module)
    with corpus.show_count("acceptance, with experts exchanged", count, "exchanges") as advance:
        exchanged = list(_compared(bench.corpus, _counted(experts, advance)))
    return _best_first([*filter(None, tried), *exchanged])


def with_main_layers(
    corpus: Corpus, layers: Iterable[DecoderLayer], tried: Iterable[Alternative]
) -> list[Alternative]:
    """Alternatives of a module whose drafts are refused, best first, and main layers as its block,
    of which those alone are kept that make it draft as a working module does."""
    corpus = by_torch(corpus)
    benches = _benches(corpus)
    found = (_on_more(benches, variant) for variant in block_variants(corpus.module, layers))
    least = gates.LEAST_ACCEPTANCE
    drafting = (one for one in found if one and one.mends_most and (one.other or 0.0) >= least)
    return _best_first([*tried, *drafting])


def sampling_step(texts: Texts) -> int:
    """Every so many texts tell most variants to be worse: 1 of few."""
    return max(1, len(texts.texts) // _SAMPLED_TEXTS)


def _benches(corpus: Corpus) -> list[_Bench]:
    """Beginnings of some texts, some texts, and all: of few texts, these alone."""
    step = sampling_step(corpus.texts)
    if step == 1:
        return [_Bench(corpus)]
    sample = corpus.every_nth(step)
    brief = sample.every_nth(1, most_tokens=_FIRST_TOKENS)
    return [_Bench(brief, is_brief=True), _Bench(sample), _Bench(corpus)]


def _on_more(benches: Sequence[_Bench], variant: Variant) -> Alternative | None:
    """A variant compared on more and more texts, until it is worse."""
    found = None
    for bench in benches:
        found = bench.alternative(variant)
        if found is not None and not bench.may_be_better(found):
            break
    return found


@dataclass(frozen=True)
class _Bench:
    """Texts on which variants are compared with the module as it is, whose drafts are made once per
    depth. is_brief: so few tokens that the interval alone tells that one is no better."""

    corpus: Corpus
    is_brief: bool = False
    _unchanged: dict[int, Drafts] = field(default_factory=dict)
    _of_own: list[torch.Tensor] = field(default_factory=list)  # scores at the temperature that fits

    def may_be_better(self, found: Alternative) -> bool:
        """True for a variant that is no worse here, and by its interval may gain enough, or that
        the few texts say nothing of."""
        gain = found.gain
        if gain.high is None:
            return True
        return gain.high > LEAST_GAIN_NATS and (self.is_brief or gain.value > 0)

    def unchanged(self, depth: int) -> Drafts:
        """The module's own drafts up to a depth."""
        if depth not in self._unchanged:
            own = unchanged(self.corpus.module, depth)
            self._unchanged[depth] = tried_drafts(self.corpus, own)
        return self._unchanged[depth]

    def alternative(self, variant: Variant) -> Alternative | None:
        """A variant compared with the module's own drafts; None where nothing is drafted."""
        corpus, depth = self.corpus, variant.depth
        drafts = tried_drafts(corpus, variant), self.unchanged(depth)
        scores, before = (clamped(each.scores[depth - 1]) for each in drafts)
        anchors, room = anchors_of(corpus, depth), drafts[0].room[depth - 1]
        gain = _gain(corpus, scores, before=before, anchors=anchors, room=room)
        if gain is None:
            return None
        other, own = (acceptance(each, depth) for each in drafts)
        hit, hit_before = (each.hit[depth - 1].double() for each in drafts)
        rise = _gain(corpus, hit, before=hit_before, anchors=anchors, room=room)
        half = changed_half(corpus.module, variant.module)
        found = Alternative(variant, gain, own=own, other=other, rise=rise, half=half)
        return found if found.rises or variant.least_rise else self._fitted(found, variant, room)

    def _fitted(self, found: Alternative, variant: Variant, room: torch.Tensor) -> Alternative:
        """One by which no more first drafts are accepted for sure, with the gain where each is at
        the temperature that fits it: what is more or less certain, and nothing else, gains nothing
        there."""
        own = unchanged(self.corpus.module)
        if not self._of_own:
            self._of_own.append(fitted_scores(self.corpus, own, room))
        scores = fitted_scores(self.corpus, variant, room)
        gain = _gain(self.corpus, scores, self._of_own[0], self.corpus.everywhere, room)
        return found if gain is None else replace(found, gain=gain, is_fitted=True)


def _counted(variants: Iterable[ScoredVariant], advance: CountCallback) -> Iterator[ScoredVariant]:
    for variant in variants:
        yield variant
        advance(1)


@torch.inference_mode()
def extra_alternatives(corpus: Corpus, draft: TargetDraft) -> list[Alternative]:
    """Every variant of an extra draft compared with it as it is, best first."""
    return _best_first(_compared(corpus, draft.variants(corpus)))


def _compared(corpus: Corpus, variants: Iterable[ScoredVariant]) -> Iterator[Alternative]:
    for variant in variants:
        anchors = corpus.everywhere
        room = corpus.texts.room(anchors, variant.depth)
        if variant.where is not None:
            room = room & variant.where
        gain = _gain(corpus, variant.scores, variant.before, anchors=anchors, room=room)
        if gain is not None:
            own, other = (_share(hit, room) for hit in (variant.hit_before, variant.hit))
            rise = _rise(corpus, variant, room) if variant.by_acceptance else None
            yield Alternative(variant, gain, own=own, other=other, rise=rise)


def _rise(corpus: Corpus, variant: ScoredVariant, room: torch.Tensor) -> Gain | None:
    """The acceptance of a variant less that of the draft as it is, over the same drafts."""
    assert variant.hit is not None and variant.hit_before is not None, "acceptance judges it"
    hit, before = variant.hit.double(), variant.hit_before.double()
    return _gain(corpus, hit, before, anchors=corpus.everywhere, room=room)


def _share(hit: torch.Tensor | None, room: torch.Tensor) -> float | None:
    return None if hit is None else float(hit[room].float().mean())


def best_of(tried: Sequence[Alternative]) -> list[Alternative]:
    """The best of the alternatives that are better than the module as it is, and those that explain
    it as well, best first; none where none is better. What betters first drafts explains what is
    wrong with later ones, too. A half that is better left out comes before them: any other change
    of it may be better by chance."""
    better = [one for one in tried if one.better and one.helps]
    first = min((one.depth for one in better), default=1)
    better = [one for one in better if one.depth == first]
    equal = [one for one in better if one is better[0] or one.explains_as_well_as(better[0])]
    return sorted(equal, key=lambda one: not one.is_left_out)


def _best_first(tried: Iterable[Alternative]) -> list[Alternative]:
    return sorted(tried, key=lambda alternative: -alternative.gain.value)


def _gain(
    corpus: Corpus,
    scores: torch.Tensor,
    before: torch.Tensor,
    anchors: Anchors,
    room: torch.Tensor,
) -> Gain | None:
    """The mean gain of scores [A] over those before, of the tokens that there is room [A] for."""
    difference = scores - before
    sums = corpus.by_text(difference, room, anchors)
    counts = corpus.by_text(torch.ones_like(difference), room, anchors)
    found = ratio(sums, counts, CONFIDENCE)
    return None if found is None else Gain(**vars(found), sums=tuple(sums), counts=tuple(counts))


@torch.inference_mode()
def first_token(corpus: Corpus) -> Alternative | None:
    """The module with position 0's embedding treated the other way, compared on drafts from the
    first row of every text; None if there is no text."""
    texts, module = corpus.texts, corpus.module
    rows = torch.tensor(texts.starts)
    inputs = DraftInputs(texts, corpus.hidden, Anchors(rows, torch.arange(len(rows))))
    target = corpus.states[1][rows + 1]
    flipped = first_token_variant(module)
    own, other = (
        overlaps(
            corpus.model.head,
            target,
            m.head,
            m.head.normed(draft_states([m], inputs, 1)[0]),
        )
        for m in (module, flipped.module)
    )
    gain = ratio([float(d) for d in other - own], [1.0] * len(rows), CONFIDENCE)
    if gain is None:
        return None
    zeroed = module.contract.zero_first_embedding
    cause = causes.first_embedding_must_be("kept" if zeroed else "zeroed")
    return Alternative(
        replace(flipped, cause=cause), gain, own=float(own.mean()), other=float(other.mean())
    )
