"""Why drafts are not accepted: the module is tried with each known mistake undone, and a drafter
that does not do as its module does is matched against known misbehaviour."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from mtp_export.verify.diagnosis.experts import expert_variants
from mtp_export.verify.diagnosis.variants import (
    Variant,
    contract_variants,
    layout_variants,
)
from mtp_export.verify.evidence.corpus import Corpus, Drafts, judge
from mtp_export.verify.evidence.statistics import Estimate, ratio
from mtp_runtime.config import Hidden
from mtp_runtime.teacher_forcing import Anchors, DraftInputs, draft_states, overlaps

# A variant is better when the target's choices gain so many nats, and its interval lies above 0.
# The first bound is what keeps variants that make no difference out, the second chance.
LEAST_GAIN_NATS = 0.03
CONFIDENCE = 0.98
# Log-probabilities are cut off here: one hopeless token must not outweigh all others.
WORST_SCORE = -8.0


@dataclass(frozen=True)
class Alternative:
    """How a variant fares against the module as it is, at one depth.

    gain: mean log-probability of the target's best tokens, variant minus own, in nats. own and
    other: greedy acceptance, where it was computed.
    """

    name: str
    change: str
    cause: str
    depth: int
    gain: Estimate
    own: float | None = None
    other: float | None = None

    @property
    def better(self) -> bool:
        low = self.gain.low
        return low is not None and low > 0 and self.gain.value > LEAST_GAIN_NATS

    @property
    def explained(self) -> str:
        """The finding as a sentence."""
        if self.own is not None and self.other is not None and self.other - self.own > 0.005:
            what = f"acceptance rises from {self.own:.2f} to {self.other:.2f}"
        else:
            what = f"the drafts' log-probability rises by {self.gain.value:.2f} nats"
        at = f" at draft {self.depth}" if self.depth > 1 else ""
        return f"{what}{at} when {self.change}: {self.cause}"


def alternatives(corpus: Corpus) -> list[Alternative]:
    """Every variant of the module, compared with it as it is; best first."""
    module = corpus.module
    before = module.contract.target_hidden is Hidden.BEFORE_NORM
    own = {d: _tried(corpus, Variant("own", "", "", module, before, d)) for d in (1, 2)}
    found = []
    for variant in (*layout_variants(corpus.model, module), *contract_variants(module)):
        depth, other = variant.depth, _tried(corpus, variant)
        gain = _gain(corpus, own[depth], other.scores[depth - 1], depth)
        if gain is not None:
            shares = [acceptance(drafts, depth) for drafts in (own[depth], other)]
            found.append(
                Alternative(variant.name, variant.change, variant.cause, depth, gain, *shares)
            )
    for expert in expert_variants(corpus, own[1].scores[0]):
        gain = _gain(corpus, own[1], expert.scores, 1)
        if gain is not None:
            found.append(Alternative("experts", expert.change, expert.cause, 1, gain))
    return sorted(found, key=lambda alternative: -alternative.gain.value)


def _anchors(corpus: Corpus, depth: int) -> Anchors:
    """Places that tell: all there are for first drafts, those of an engine for later ones, each of
    which attends to its whole text anew."""
    return corpus.everywhere if depth == 1 else corpus.anchors


def _tried(corpus: Corpus, variant: Variant) -> Drafts:
    """What a variant drafts up to its depth, against the target's own best tokens."""
    anchors = _anchors(corpus, variant.depth)
    outputs = variant_outputs(corpus, variant, variant.depth, anchors)
    return judge(corpus.modules(variant.module), corpus.texts, anchors, outputs, corpus.choices)


def drafts_of(corpus: Corpus, variant: Variant, depths: int) -> Drafts:
    """What a variant drafts."""
    outputs = variant_outputs(corpus, variant, depths)
    return judge(corpus.modules(variant.module), corpus.texts, corpus.anchors, outputs)


@torch.inference_mode()
def variant_outputs(
    corpus: Corpus, variant: Variant, depths: int, anchors: Anchors | None = None
) -> list[torch.Tensor]:
    """A variant's MTP output [A, d] before the norm, of each depth."""
    before, after = corpus.states
    hidden = before if variant.before_norm else after
    return corpus.draft_outputs(depths, variant.module, hidden, variant.recycle, anchors)


def acceptance(drafts: Drafts, depth: int) -> float:
    """Greedy acceptance at a depth, given that the drafts before it stand."""
    where = drafts.stands(depth - 1) & drafts.room[depth - 1]
    return float((drafts.hit[depth - 1] & where).sum() / max(1, int(where.sum())))


def _gain(corpus: Corpus, own: Drafts, scores: torch.Tensor, depth: int) -> Estimate | None:
    room = own.room[depth - 1]
    difference = scores.clamp(min=WORST_SCORE) - own.scores[depth - 1].clamp(min=WORST_SCORE)
    anchors = _anchors(corpus, depth)
    sums = corpus.by_text(difference, room, anchors)
    return ratio(sums, corpus.by_text(torch.ones_like(difference), room, anchors), CONFIDENCE)


@torch.inference_mode()
def first_token(corpus: Corpus) -> Alternative | None:
    """Whether position 0's embedding is treated as the module was trained: drafts from the first
    row of every text, as recorded and the other way."""
    texts, module = corpus.texts, corpus.module
    rows = torch.tensor(texts.starts)
    anchors = Anchors(rows, torch.arange(len(rows)))
    zero = module.contract.zero_first_embedding
    flipped = replace(module, contract=replace(module.contract, zero_first_embedding=not zero))
    inputs = DraftInputs(texts, corpus.hidden, anchors)
    target = corpus.states[1][rows + 1]
    own, other = (
        overlaps(
            corpus.model.head,
            target,
            m.head,
            m.head.normed(draft_states([m], inputs, 1)[0]),
        )
        for m in (module, flipped)
    )
    gain = ratio([float(d) for d in other - own], [1.0] * len(rows), CONFIDENCE)
    if gain is None:
        return None
    return Alternative(
        "zero_first_embedding",
        f"the first token's embedding is {'kept' if zero else 'zeroed'}",
        "first-token handling: the embedding of position 0 must be"
        f" {'kept' if zero else 'zeroed'} for this module",
        1,
        gain,
        float(own.mean()),
        float(other.mean()),
    )
