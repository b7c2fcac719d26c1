"""Variants of a bundle's own drafts, each without one known bug: a better one names it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from mtp_export.verify.diagnosis.alternatives import CONFIDENCE, WORST_SCORE, Alternative
from mtp_export.verify.diagnosis.causes import decoding as causes
from mtp_export.verify.evidence.corpus import Corpus
from mtp_export.verify.evidence.own_drafts import OwnDraft
from mtp_export.verify.evidence.statistics import ratio
from mtp_runtime.models.eagle3 import Eagle3Module, ReducedHead
from mtp_runtime.models.parallel_heads import FfnHeads, LayerHeads
from mtp_runtime.teacher_forcing import (
    DraftInputs,
    PagedTexts,
    draft_states,
    logits_by_chunk,
    model_states,
    through_layer,
)


@dataclass(frozen=True)
class _Variant:
    """A changed draft: how it was changed, what is wrong if that drafts better, and the
    log-probability [A] of the target's best token at every anchor."""

    name: str
    change: str
    cause: str
    scores: torch.Tensor


@torch.inference_mode()
def own_alternatives(corpus: Corpus, own: OwnDraft) -> list[Alternative]:
    """Every variant of a draft compared with it as it is, best first."""
    weights = own.draft.weights
    if isinstance(weights, Eagle3Module):
        pairs = [*_eagle3_variants(corpus, own, weights)]
    else:
        pairs = [*_heads_variants(corpus, own, weights)]
    found = []
    for depth, before, variant in pairs:
        room = corpus.texts.room(corpus.everywhere, depth)
        difference = variant.scores - before
        sums = corpus.by_text(difference, room, corpus.everywhere)
        counts = corpus.by_text(torch.ones_like(difference), room, corpus.everywhere)
        gain = ratio(sums, counts, CONFIDENCE)
        if gain is not None:
            found.append(
                Alternative(
                    name=variant.name,
                    change=variant.change,
                    cause=variant.cause,
                    depth=1,
                    gain=gain,
                )
            )
    return sorted(found, key=lambda alternative: -alternative.gain.value)


Compared = tuple[int, torch.Tensor, _Variant]  # depth of the last token, scores as it is, variant


def _wanted(corpus: Corpus, depth: int) -> torch.Tensor:
    """The target's best token [A] at a depth, from 1, of every anchor."""
    rows = corpus.everywhere.rows + depth
    return corpus.choices[rows.clamp(max=len(corpus.choices) - 1)]


def _clamped(scores: torch.Tensor) -> torch.Tensor:
    return scores.clamp(min=WORST_SCORE)


def _eagle3_variants(corpus: Corpus, own: OwnDraft, module: Eagle3Module) -> Iterator[Compared]:
    """Other taps, and other tokens of the head."""
    taps, layers = own.draft.taps, corpus.model.config.layers
    before = _eagle3_scores(corpus, module, taps)
    for shift in (-1, 1):
        moved = tuple(tap + shift for tap in taps)
        if moved[0] > 0 and moved[-1] < layers:
            scores = _eagle3_scores(corpus, module, moved)
            change = f"the inputs of layers {moved} are tapped, not of {taps}"
            yield 1, before, _Variant("taps", change, causes.TAPS_OFF_BY_ONE, scores)
    head = module.head
    if isinstance(head, ReducedHead):
        for shift in (-1, 1):
            tokens = (head.tokens + shift) % head.vocab
            scores = _eagle3_scores(
                corpus, replace(module, head=replace(head, tokens=tokens)), taps
            )
            change = f"d2t is {'one lower' if shift < 0 else 'one higher'}"
            yield 1, before, _Variant("d2t", change, causes.D2T_SHIFTED, scores)


def _eagle3_scores(corpus: Corpus, module: Eagle3Module, taps: tuple[int, ...]) -> torch.Tensor:
    states = model_states(corpus.model.tapped(taps), corpus.texts)
    assert states.taps is not None, "the model is tapped"
    inputs = DraftInputs(corpus.texts, module.combined(states.taps), corpus.everywhere)
    (x,) = draft_states([module], inputs, 1)
    wanted, found = _wanted(corpus, 1), []
    for rows, logits in logits_by_chunk(module.head, module.head.normed(x)):
        own = wanted[rows].to(logits.device)[:, None]
        found.append(logits.log_softmax(dim=-1).gather(1, own)[:, 0].cpu())
    return _clamped(torch.cat(found))


def _heads_variants(
    corpus: Corpus, own: OwnDraft, heads: FfnHeads | LayerHeads
) -> Iterator[Compared]:
    """Every pair of heads exchanged."""
    bodies = _bodies(corpus, own, heads)  # [k, A, d]
    scores = torch.stack(
        [_head_scores(heads, bodies, _wanted(corpus, depth)) for depth in range(1, len(heads) + 1)]
    )  # [depth, head, A]
    for one in range(len(heads)):
        for other in range(one + 1, len(heads)):
            before = scores[one, one] + scores[other, other]
            swapped = scores[one, other] + scores[other, one]
            change = f"heads {one} and {other} are exchanged"
            cause = causes.heads_swapped(one, other)
            yield other + 1, before, _Variant("heads", change, cause, swapped)


def _bodies(corpus: Corpus, own: OwnDraft, heads: FfnHeads | LayerHeads) -> torch.Tensor:
    """The output of every head's body at every anchor [k, A, d]."""
    rows = corpus.everywhere.rows
    if isinstance(heads, FfnHeads):
        return heads.bodies(corpus.states[1][rows])
    states = model_states(own.model, corpus.texts)
    assert states.taps is not None, "the model is tapped"
    paged = PagedTexts.of(corpus.texts)
    chunks = paged.chunks(own.model.device)
    return torch.stack(
        [through_layer(layer, states.taps, paged.pages, chunks)[rows] for layer in heads.layers]
    )


_ROWS = 512  # whose logits are computed at a time


def _head_scores(
    heads: FfnHeads | LayerHeads, bodies: torch.Tensor, wanted: torch.Tensor
) -> torch.Tensor:
    """The log-probability [k, A] of a token [A] by every head."""
    found = []
    for part, own in zip(bodies.split(_ROWS, dim=1), wanted.split(_ROWS), strict=True):
        ids = own.to(part.device)[None, :, None].expand(len(heads), -1, 1)
        found.append(heads.logits(part).log_softmax(dim=-1).gather(2, ids)[..., 0].cpu())
    return _clamped(torch.cat(found, dim=1))
