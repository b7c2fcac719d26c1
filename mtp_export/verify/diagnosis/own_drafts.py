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
from mtp_runtime.models.model import Head
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
    taps = own.draft.taps
    states = _states_by_layer(corpus, taps)
    outputs = {
        shift: _eagle3_output(corpus, module, [states[tap + shift] for tap in taps])
        for shift in (0, -1, 1)
        if all(tap + shift in states for tap in taps)
    }
    before = _scores(corpus, module.head, outputs[0])
    for shift in outputs.keys() - {0}:
        scores = _scores(corpus, module.head, outputs[shift])
        moved = tuple(tap + shift for tap in taps)
        change = f"the inputs of layers {moved} are tapped, not of {taps}"
        yield 1, before, _Variant("taps", change, causes.TAPS_OFF_BY_ONE, scores)
    head = module.head
    if isinstance(head, ReducedHead):
        for shift, change in ((-1, "d2t is one lower"), (1, "d2t is one higher")):
            tokens = (head.tokens + shift) % head.vocab
            scores = _scores(corpus, replace(head, tokens=tokens), outputs[0])
            yield 1, before, _Variant("d2t", change, causes.D2T_SHIFTED, scores)


def _states_by_layer(corpus: Corpus, taps: tuple[int, ...]) -> dict[int, torch.Tensor]:
    """The inputs [T, d] of the tapped layers and of those beside them, in one pass."""
    layers = range(1, corpus.model.config.layers)
    wanted = sorted({tap + shift for tap in taps for shift in (-1, 0, 1)}.intersection(layers))
    states = model_states(corpus.model.tapped(wanted), corpus.texts)
    assert states.taps is not None, "the model is tapped"
    return dict(zip(wanted, states.taps.chunk(len(wanted), dim=1), strict=True))


def _eagle3_output(
    corpus: Corpus, module: Eagle3Module, states: list[torch.Tensor]
) -> torch.Tensor:
    """The output [A, d] of first drafts before the norm, given the tapped states."""
    hidden = module.combined(torch.cat(states, dim=1))
    return draft_states([module], DraftInputs(corpus.texts, hidden, corpus.everywhere), 1)[0]


def _scores(corpus: Corpus, head: Head, x: torch.Tensor) -> torch.Tensor:
    wanted, found = _wanted(corpus, 1), []
    for rows, logits in logits_by_chunk(head, head.normed(x)):
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
    parts = zip(torch.split(bodies, _ROWS, dim=1), torch.split(wanted, _ROWS), strict=True)
    for part, own in parts:
        ids = own.to(part.device)[None, :, None].expand(len(heads), -1, 1)
        found.append(heads.logits(part).log_softmax(dim=-1).gather(2, ids)[..., 0].cpu())
    return _clamped(torch.cat(found, dim=1))
