"""Whether the engine's drafter does as its module: what it proposed is held against what the module
drafts, teacher-forced, at the same places, token by token and law by law. Where they differ, known
misbehaviours are tried."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mtp_export.verify.check import Item, Status
from mtp_export.verify.diagnosis.draft_causes import variant_outputs
from mtp_export.verify.diagnosis.variants import Variant, behaviour_variants
from mtp_export.verify.evidence.corpus import Corpus
from mtp_export.verify.evidence.decode import Decoded, Proposal
from mtp_runtime.config import Hidden
from mtp_runtime.teacher_forcing import logits_by_chunk

# The part of a drafter's proposals that a known misbehaviour must account for.
LEAST_EXPLAINED = 0.98
# A module whose two best tokens are this close, in logits, may draft either.
NEAR_TIE = 1e-3
# A probability in a drafter's law may differ so much by rounding; a misbehaviour moves most of them
# by more. Rounding that sends a row to another expert moves more, and is rare.
LARGEST_SHIFT = 1e-3
LEAST_LAWS = 0.99


@dataclass(frozen=True)
class Agreement:
    """Of the proposals that a module accounts for, by draft position: equal, compared."""

    equal: tuple[int, ...]
    compared: tuple[int, ...]

    @property
    def share(self) -> float:
        """The worst position's share."""
        shares = [e / c for e, c in zip(self.equal, self.compared, strict=True) if c]
        return min(shares, default=1.0)

    def shown(self) -> str:
        counts = [f"{e}/{c}" for e, c in zip(self.equal, self.compared, strict=True)]
        return f"{self.share:.1%} (by position {', '.join(counts)})"


@dataclass(frozen=True)
class Place:
    """A proposal where the module can be held against it, and the anchor that it starts from."""

    anchor: int
    proposal: Proposal


# Whether each place's draft at a depth (from 0), of MTP output [n, d], is what was proposed.
Compare = Callable[[Corpus, torch.Tensor, Sequence[Place], int], Sequence[bool]]


def drafter_items(corpus: Corpus, k: int) -> Iterator[Item]:
    """The greedy run's tokens, then the laws of a run that samples."""
    yield _item(
        "the drafter does as its module",
        "all equal but for near-ties",
        1.0,
        corpus,
        corpus.speculative(k),
        k,
        same_tokens,
    )
    sampled, decoded = corpus.sampled(k)
    yield _item(
        "the drafter's laws are its module's",
        f"{LEAST_LAWS:.0%} within {LARGEST_SHIFT:g}",
        LEAST_LAWS,
        sampled,
        decoded,
        k,
        same_laws,
    )


def _item(
    name: str,
    bound: str,
    least: float,
    corpus: Corpus,
    decoded: Decoded,
    k: int,
    compare: Compare,
) -> Item:
    found = agreement(corpus, decoded, corpus.draft_outputs(k), compare)
    if not sum(found.compared):
        return Item(name, Status.NOT_TESTED, cause="nothing was drafted on the texts")
    if found.share >= least:
        return Item(name, Status.PASS, found.shown(), bound)
    known = misbehaviour(corpus, decoded, k, compare)
    cause = (
        "the engine's proposals are not its module's, and no known misbehaviour accounts for them"
        if known is None
        else f"{known[0]} ({known[1]:.1%} of the proposals are as this would make them)"
    )
    return Item(name, Status.FAIL, found.shown(), bound, cause=cause)


@torch.inference_mode()
def agreement(
    corpus: Corpus, decoded: Decoded, outputs: Sequence[torch.Tensor], compare: Compare
) -> Agreement:
    """How far a run's proposals are those of MTP outputs [A, d] by depth, where its text is the
    corpus's.

    A proposal is compared up to its first token that is not the text's: from there on the outputs
    at hand were fed another token than the drafter was.
    """
    places = _places(corpus, decoded, len(outputs))
    equal = []
    for depth, (x, here) in enumerate(zip(outputs, places, strict=True)):
        rows = x[torch.tensor([place.anchor for place in here], dtype=torch.long)]
        equal.append(sum(compare(corpus, rows, here, depth)) if here else 0)
    return Agreement(tuple(equal), tuple(map(len, places)))


def same_tokens(
    corpus: Corpus, x: torch.Tensor, places: Sequence[Place], depth: int
) -> Sequence[bool]:
    """The module's best token, or one so close that rounding decides."""
    head = corpus.module_at(depth).head
    equal: list[bool] = []
    for rows, logits in logits_by_chunk(head, head.normed(x)):
        wanted = torch.tensor([place.proposal.tokens[depth] for place in places[rows]])
        behind = logits.amax(dim=-1) - logits.gather(1, wanted.to(logits.device)[:, None])[:, 0]
        equal += (behind < NEAR_TIE).tolist()
    return equal


def same_laws(
    corpus: Corpus, x: torch.Tensor, places: Sequence[Place], depth: int
) -> Sequence[bool]:
    """The probabilities of the drafter's likeliest tokens."""
    head = corpus.module_at(depth).head
    equal: list[bool] = []
    for rows, logits in logits_by_chunk(head, head.normed(x)):
        peaks = [place.proposal.peaks for place in places[rows]]
        ids = torch.tensor(np.stack([own.tokens[depth] for own in peaks if own is not None]))
        wanted = torch.tensor(np.stack([own.probs[depth] for own in peaks if own is not None]))
        found = logits.double().softmax(dim=-1).cpu().gather(1, ids)
        equal += ((found - wanted).abs().amax(dim=1) <= LARGEST_SHIFT).tolist()
    return equal


def _places(corpus: Corpus, decoded: Decoded, depths: int) -> list[list[Place]]:
    """By depth, where a run's proposals can be compared."""
    at = {int(row): index for index, row in enumerate(corpus.anchors.rows)}
    same = [
        _common(r.tokens, t.tokens)
        for r, t in zip(decoded.requests, corpus.texts.texts, strict=True)
    ]
    places: list[list[Place]] = [[] for _ in range(depths)]
    for proposal in decoded.proposals:
        anchor = at.get(corpus.texts.starts[proposal.request] + proposal.last - 1)
        if anchor is None:
            continue
        for depth in _comparable(corpus, proposal, same[proposal.request], depths):
            places[depth].append(Place(anchor, proposal))
    return places


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


def misbehaviour(
    corpus: Corpus, decoded: Decoded, depths: int, compare: Compare
) -> tuple[str, float] | None:
    """The known misbehaviour that accounts for a run's proposals, and how far it does. Of several
    that do, one of recursion is meant where first drafts are as they should be."""
    own = agreement(corpus, decoded, corpus.draft_outputs(depths), compare)
    in_recursion = own.equal[0] == own.compared[0]
    fits = [
        (
            agreement(corpus, decoded, variant_outputs(corpus, variant, depths), compare).share,
            variant,
        )
        for variant in behaviour_variants(corpus.module)
    ]
    share, variant = max(fits, key=lambda fit: (fit[0], (fit[1].depth > 1) == in_recursion))
    if share < LEAST_EXPLAINED:
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
