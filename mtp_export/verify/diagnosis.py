"""Why drafts are not accepted: the module is tried with each known mistake undone, and a drafter
that does not do as its module does is matched against known misbehaviour."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from mtp_export.verify.corpus import Corpus, Drafts
from mtp_export.verify.decode import Decoded, Proposal
from mtp_export.verify.experts import expert_variants
from mtp_export.verify.statistics import Estimate, ratio
from mtp_export.verify.variants import (
    Variant,
    behaviour_variants,
    contract_variants,
    layout_variants,
)
from mtp_runtime.config import Hidden
from mtp_runtime.teacher import Anchors, draft_states, overlaps

# A variant is better when the text's tokens gain so many nats, and its interval lies above zero.
# The first bound is what keeps variants that make no difference out, the second chance.
LEAST_GAIN_NATS = 0.03
CONFIDENCE = 0.98
# Log-probabilities are cut off here: one hopeless token must not outweigh all others.
WORST_SCORE = -8.0
# The part of a drafter's proposals that a known misbehaviour must account for.
LEAST_AGREEMENT = 0.98
# A module whose two best tokens are this close may draft either.
NEAR_TIE = 1e-3


@dataclass(frozen=True)
class Alternative:
    """How a variant fares against the module as it is, at one depth.

    gain: mean log-probability of the text's tokens, variant minus own, in nats. own and other:
    greedy acceptance, where it was computed.
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
    """Every variant of the module, compared; best first."""
    module, depths = corpus.module, 2
    own = corpus.drafts(depths)
    found = []
    for variant in (*layout_variants(corpus.model, module), *contract_variants(module)):
        other = drafts_of(corpus, variant, depths)
        gain = _gain(corpus, own, other.scores[variant.depth - 1], variant.depth)
        if gain is not None:
            found.append(
                Alternative(
                    variant.name,
                    variant.change,
                    variant.cause,
                    variant.depth,
                    gain,
                    acceptance(corpus, own, variant.depth),
                    acceptance(corpus, other, variant.depth),
                )
            )
    for expert in expert_variants(corpus):
        gain = _gain(corpus, own, expert.scores, 1)
        if gain is not None:
            found.append(Alternative("experts", expert.change, expert.cause, 1, gain))
    return sorted(found, key=lambda alternative: -alternative.gain.value)


def drafts_of(corpus: Corpus, variant: Variant, depths: int) -> Drafts:
    """What a variant drafts."""
    before, after = corpus.states
    hidden = before if variant.before_norm else after
    return corpus.drafts(depths, variant.module, hidden, variant.recycle)


def acceptance(corpus: Corpus, drafts: Drafts, depth: int) -> float:
    """Greedy acceptance at a depth, given that the drafts before it stand."""
    where = drafts.stands(depth - 1) & drafts.room[depth - 1]
    return float((drafts.hit[depth - 1] & where).sum() / max(1, int(where.sum())))


def _gain(corpus: Corpus, own: Drafts, scores: torch.Tensor, depth: int) -> Estimate | None:
    room = own.room[depth - 1]
    difference = scores.clamp(min=WORST_SCORE) - own.scores[depth - 1].clamp(min=WORST_SCORE)
    sums = corpus.by_text(difference, room)
    return ratio(sums, corpus.by_text(torch.ones_like(difference), room), CONFIDENCE)


@torch.inference_mode()
def first_token(corpus: Corpus) -> Alternative | None:
    """Whether position 0's embedding is treated as the module was trained: drafts from the first
    row of every text, as recorded and the other way."""
    texts, module = corpus.texts, corpus.module
    rows = torch.tensor(texts.starts)
    anchors = Anchors(rows, torch.arange(len(rows)))
    zero = module.contract.zero_first_embedding
    flipped = replace(module, contract=replace(module.contract, zero_first_embedding=not zero))
    target = corpus.states[1][rows + 1]
    own, other = (
        overlaps(
            corpus.model.head,
            target,
            m.head,
            m.head.normed(draft_states(corpus.model, m, texts, corpus.hidden, anchors, 1)[0]),
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


@dataclass(frozen=True)
class Agreement:
    """Of the proposals that a variant accounts for, by draft position: equal, compared."""

    equal: tuple[int, ...]
    compared: tuple[int, ...]

    @property
    def share(self) -> float:
        """The worst position's share."""
        shares = [e / c for e, c in zip(self.equal, self.compared, strict=True) if c]
        return min(shares, default=1.0)


def agreement(corpus: Corpus, decoded: Decoded, drafts: Drafts) -> Agreement:
    """How far a run's proposals are those of given drafts, where its text is the corpus's.

    A proposal is compared up to its first token that is not the text's: from there on the drafts
    at hand were fed another token than the drafter was.
    """
    at = {int(row): index for index, row in enumerate(corpus.anchors.rows)}
    same = [
        _common(r.tokens, t.tokens)
        for r, t in zip(decoded.requests, corpus.texts.texts, strict=True)
    ]
    depths = len(drafts.best)
    equal, compared = [0] * depths, [0] * depths
    for proposal in decoded.proposals:
        anchor = at.get(corpus.texts.starts[proposal.request] + proposal.last - 1)
        if anchor is None:
            continue
        for depth in _comparable(corpus, proposal, same[proposal.request], depths):
            compared[depth] += 1
            same_token = proposal.tokens[depth] == int(drafts.best[depth][anchor])
            equal[depth] += same_token or float(drafts.margins[depth][anchor]) < NEAR_TIE
    return Agreement(tuple(equal), tuple(compared))


def _comparable(corpus: Corpus, proposal: Proposal, same: int, depths: int) -> range:
    tokens = corpus.texts.texts[proposal.request].tokens
    count = 0
    for token in proposal.tokens[:depths]:
        place = proposal.last + 1 + count
        if place >= same:
            break
        count += 1
        if token != tokens[place]:
            break
    return range(count)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences begin with in common."""
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


def misbehaviour(corpus: Corpus, decoded: Decoded, depths: int) -> tuple[str, float] | None:
    """The known misbehaviour that accounts for a run's proposals, and how far it does. Of several
    that do, one of recursion is meant where first drafts are as they should be."""
    own = agreement(corpus, decoded, corpus.drafts(depths))
    in_recursion = own.equal[0] == own.compared[0]
    fits = [
        (agreement(corpus, decoded, drafts_of(corpus, variant, depths)).share, variant)
        for variant in behaviour_variants(corpus.module)
    ]
    share, variant = max(fits, key=lambda fit: (fit[0], (fit[1].depth > 1) == in_recursion))
    if share < LEAST_AGREEMENT:
        return None
    return _behaviour(variant), share


def _behaviour(variant: Variant) -> str:
    contract = variant.module.contract
    words = {
        "target_hidden": "the drafter is fed the target's hidden state on the other side of the"
        " norm than the contract says",
        "recycled_hidden": "pre-norm hidden recycled: the recycled hidden state is not normalised"
        if contract.recycled_hidden is Hidden.BEFORE_NORM
        else "the recycled hidden state is normalised where the contract says it is not",
        "zero_first_embedding": "first-token handling: the drafter does not treat position 0's"
        " embedding as the contract says",
    }
    return words.get(variant.name, variant.cause)
