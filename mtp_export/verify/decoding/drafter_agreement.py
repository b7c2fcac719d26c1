"""Agreement of the engine's drafter with its module: tokens and distributions that it proposed are
compared with the module's own, teacher-forced, at the same places. Where they differ, known drafter
bugs are tried."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mtp_export.verify.check import Item, failed, not_tested, passed
from mtp_export.verify.diagnosis.causes import decoding as causes
from mtp_export.verify.diagnosis.variant_drafts import variant_outputs
from mtp_export.verify.diagnosis.variants import drafter_variants
from mtp_export.verify.evidence.corpus import Corpus
from mtp_export.verify.evidence.decode import Decoded, Proposal
from mtp_runtime.teacher_forcing import logits_by_chunk

# The least share of a drafter's proposals that a known bug must explain.
LEAST_EXPLAINED = 0.98
# A module whose two best tokens are this close, in logits, may draft either.
NEAR_TIE = 1e-3
# Rounding may change a reported probability by this much; a drafter bug changes most of them
# by more. Rounding that sends a row to another expert changes more, and is rare: hence a share.
LARGEST_SHIFT = 1e-3
LEAST_EQUAL_DISTRIBUTIONS = 0.99


@dataclass(frozen=True)
class Agreement:
    """Proposals by draft position: those equal to a module's drafts, and those compared."""

    equal: tuple[int, ...]
    compared: tuple[int, ...]

    @property
    def share(self) -> float:
        """The share of equal proposals at the worst position."""
        shares = [e / c for e, c in zip(self.equal, self.compared, strict=True) if c]
        return min(shares, default=1.0)

    def shown(self) -> str:
        counts = [f"{e}/{c}" for e, c in zip(self.equal, self.compared, strict=True)]
        return f"{self.share:.1%} (by position {', '.join(counts)})"


@dataclass(frozen=True)
class Place:
    """A proposal that can be compared with the module, and the anchor that it starts from."""

    anchor: int
    proposal: Proposal


# Compares the module's drafts at a depth (from 0), of its outputs [n, d], with n proposals.
Compare = Callable[[Corpus, torch.Tensor, Sequence[Place], int], Sequence[bool]]


@dataclass(frozen=True)
class Comparison:
    """A run compared with the module, and the least share of equal proposals that passes."""

    name: str
    bound: str
    least: float
    compare: Compare

    def item(self, corpus: Corpus, decoded: Decoded, k: int) -> Item:
        """The agreement of a run with k drafts, and the drafter bug that explains a lack of it."""
        found = agreement(corpus, decoded, outputs=corpus.draft_outputs(k), compare=self.compare)
        if not sum(found.compared):
            return not_tested(self.name, "nothing was drafted on the texts")
        if found.share >= self.least:
            return passed(self.name, figure=found.shown(), bound=self.bound)
        known = drafter_bug(corpus, decoded, depths=k, compare=self.compare)
        cause = causes.DRAFTER_UNEXPLAINED if known is None else causes.drafter_explained(*known)
        return failed(self.name, cause, figure=found.shown(), bound=self.bound)


def drafter_items(corpus: Corpus, k: int) -> Iterator[Item]:
    """The tokens of the greedy run, then the distributions of a run that samples."""
    tokens = Comparison(
        name="the drafter does as its module",
        bound="all equal but for near-ties",
        least=1.0,
        compare=equal_tokens,
    )
    yield tokens.item(corpus, corpus.speculative(k), k)
    distributions = Comparison(
        name="the drafter's distributions are its module's",
        bound=f"{LEAST_EQUAL_DISTRIBUTIONS:.0%} within {LARGEST_SHIFT:g}",
        least=LEAST_EQUAL_DISTRIBUTIONS,
        compare=equal_distributions,
    )
    yield distributions.item(*corpus.sampled(k), k)


@torch.inference_mode()
def agreement(
    corpus: Corpus, decoded: Decoded, outputs: Sequence[torch.Tensor], compare: Compare
) -> Agreement:
    """Agreement of a run's proposals with MTP outputs, [A, d] per depth, where the run's text is
    the corpus's.

    A proposal is compared up to its first token that is not the text's: from there on the outputs
    at hand were fed another token than the drafter was.
    """
    places = _places(corpus, decoded, len(outputs))
    equal = []
    for depth, (x, here) in enumerate(zip(outputs, places, strict=True)):
        rows = x[torch.tensor([place.anchor for place in here], dtype=torch.long)]
        equal.append(sum(compare(corpus, rows, here, depth)) if here else 0)
    return Agreement(tuple(equal), tuple(map(len, places)))


def equal_tokens(
    corpus: Corpus, x: torch.Tensor, places: Sequence[Place], depth: int
) -> Sequence[bool]:
    """True where the proposed token is the module's best, or so close that rounding decides."""
    head = corpus.module_at(depth).head
    equal: list[bool] = []
    for rows, logits in logits_by_chunk(head, head.normed(x)):
        wanted = torch.tensor([place.proposal.tokens[depth] for place in places[rows]])
        behind = logits.amax(dim=-1) - logits.gather(1, wanted.to(logits.device)[:, None])[:, 0]
        equal += (behind < NEAR_TIE).tolist()
    return equal


def equal_distributions(
    corpus: Corpus, x: torch.Tensor, places: Sequence[Place], depth: int
) -> Sequence[bool]:
    """True where the module gives the drafter's likeliest tokens the reported probabilities."""
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
    """The proposals of a run that can be compared, by depth."""
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
        for depth in _comparable(corpus, proposal, same=same[proposal.request], depths=depths):
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
    """Length of the longest common prefix."""
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


def drafter_bug(
    corpus: Corpus, decoded: Decoded, depths: int, compare: Compare
) -> tuple[str, float] | None:
    """The cause that explains a run's proposals best, and the share that it explains; None if it
    explains too few. Of several, one of recursion is meant if first drafts are right."""
    own = agreement(corpus, decoded, outputs=corpus.draft_outputs(depths), compare=compare)
    in_recursion = own.equal[0] == own.compared[0]
    fits = [
        (
            agreement(
                corpus, decoded, outputs=variant_outputs(corpus, variant, depths), compare=compare
            ).share,
            variant,
        )
        for variant in drafter_variants(corpus.module)
    ]
    share, variant = max(fits, key=lambda fit: (fit[0], (fit[1].depth > 1) == in_recursion))
    if share < LEAST_EXPLAINED:
        return None
    return variant.cause, share
