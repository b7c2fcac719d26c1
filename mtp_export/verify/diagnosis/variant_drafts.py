"""Drafts of variants of the MTP module, judged by the target's own best tokens."""

from __future__ import annotations

import torch

from mtp_export.verify.diagnosis.variants import Variant
from mtp_export.verify.evidence.corpus import Corpus, Drafts, judge
from mtp_export.verify.evidence.likelihood import tempered_scores
from mtp_runtime.teacher_forcing import WORST_SCORE, Anchors


def anchors_of(corpus: Corpus, depth: int) -> Anchors:
    """Rows to score: all for first drafts; for later ones, each of which attends to its whole text
    anew, the fewer where an engine would draft."""
    return corpus.everywhere if depth == 1 else corpus.anchors


def tried_drafts(corpus: Corpus, variant: Variant) -> Drafts:
    """Drafts of a variant up to its depth, judged by the target's own best tokens."""
    anchors = anchors_of(corpus, variant.depth)
    outputs = variant_outputs(corpus, variant, depths=variant.depth, anchors=anchors)
    return judge(
        corpus.modules(variant.module),
        texts=corpus.texts,
        anchors=anchors,
        states=outputs,
        following=corpus.choices,
    )


def drafts_of(corpus: Corpus, variant: Variant, depths: int) -> Drafts:
    """Drafts of a variant where an engine would draft, judged by the texts."""
    outputs = variant_outputs(corpus, variant, depths)
    return judge(
        corpus.modules(variant.module), texts=corpus.texts, anchors=corpus.anchors, states=outputs
    )


@torch.inference_mode()
def variant_outputs(
    corpus: Corpus, variant: Variant, depths: int, anchors: Anchors | None = None
) -> list[torch.Tensor]:
    """MTP outputs [A, d] of a variant before the norm, one per depth."""
    before, after = corpus.states
    hidden = before if variant.before_norm else after
    return corpus.draft_outputs(
        depths, module=variant.module, hidden=hidden, recycle=variant.recycle, anchors=anchors
    )


def acceptance(drafts: Drafts, depth: int) -> float:
    """Greedy acceptance at a depth, given that the drafts before it are accepted."""
    where = drafts.reached(depth - 1) & drafts.room[depth - 1]
    return float((drafts.hit[depth - 1] & where).sum() / max(1, int(where.sum())))


def clamped(scores: torch.Tensor) -> torch.Tensor:
    return scores.clamp(min=WORST_SCORE)


def fitted_scores(corpus: Corpus, variant: Variant, room: torch.Tensor) -> torch.Tensor:
    """The log-probability [A] of the target's own best tokens as first drafts of a variant, at the
    temperature at which those that there is room [A] for are likeliest."""
    anchors = corpus.everywhere
    states = variant_outputs(corpus, variant, depths=1, anchors=anchors)[0]
    wanted = corpus.choices[(anchors.rows + 1).clamp(max=len(corpus.choices) - 1)]
    scores = tempered_scores(variant.module.head, states, wanted)
    return clamped(scores[:, int(scores[room].sum(dim=0).argmax())])
