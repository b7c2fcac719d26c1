"""Exact acceptance: the output follows the target's distribution, whatever the drafts are.

Source: Leviathan et al., Fast Inference from Transformers via Speculative Decoding, algorithm 1. It
needs the full distribution that each draft was drawn from.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mtp_runtime.acceptance.base import AcceptanceRule, Block, Verdict
from mtp_runtime.sampling import Choices, Probabilities


def accept_exact(block: Block, choices: Choices) -> Verdict:
    """Accept by rejection sampling."""
    draft = block.draft
    for index, token in enumerate(draft.tokens):
        target = block.target_probs[index]
        if draft.draft_probs is None:
            proposed, probability = None, 1.0
        else:
            proposed = draft.draft_probs[index]
            probability = float(proposed[token])
        if choices.accept(min(1.0, float(target[token]) / probability)):
            continue
        return Verdict(index, choices.draw(_residual(target, proposed, token)))
    return Verdict(len(draft.tokens), choices.draw(block.target_probs[len(draft.tokens)]))


def _residual(target: Probabilities, proposed: Probabilities | None, token: int) -> Probabilities:
    """Return max(target - draft, 0), normalised; the target where rounding leaves nothing."""
    left = target.copy()
    if proposed is None:
        left[token] = 0.0
    else:
        left = np.maximum(left - proposed, 0.0)
    mass = left.sum()
    return left / mass if mass > 0.0 else target


def accept_best(drafts: Sequence[int], best: Sequence[int]) -> Verdict:
    """Accept drafts while each is the target's best token; best has one token more than drafts."""
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == best[accepted]:
        accepted += 1
    return Verdict(accepted, best[accepted])


EXACT = AcceptanceRule(accept_exact, accept_greedy=accept_best)
