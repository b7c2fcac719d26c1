"""Which drafts of a block stand, and the token after them: pure rules, one request at a time.

`exact` leaves the target's law unchanged. `topp_window` and `relaxed` do not: they accept more and
are there because engines have them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mtp_runtime.config import SpeculationConfig
from mtp_runtime.sampling import Choices, Probabilities, SamplingParams


@dataclass(frozen=True)
class Draft:
    """Proposed tokens, and the law each was drawn from [n, vocab]; None means certainty."""

    tokens: tuple[int, ...] = ()
    draft_probs: Probabilities | None = None


@dataclass(frozen=True)
class Verdict:
    """The first `accepted` drafts stand, and `last` follows them."""

    accepted: int
    last: int


@dataclass(frozen=True)
class Question:
    """What a rule decides on. target_probs [n+1, vocab]: the law after 0, 1, ... n drafts."""

    draft: Draft
    target_probs: Probabilities
    params: SamplingParams
    settings: SpeculationConfig


Rule = Callable[[Question, Choices], Verdict]


def accept_greedy(drafts: Sequence[int], best: Sequence[int]) -> Verdict:
    """Drafts stand while each is the target's best token; best has one token more than drafts."""
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == best[accepted]:
        accepted += 1
    return Verdict(accepted, best[accepted])


def accept_exact(question: Question, choices: Choices) -> Verdict:
    """Rejection sampling: the result follows the target's law, whatever the drafts are.

    Source: Leviathan et al., Fast Inference from Transformers via Speculative Decoding,
    algorithm 1. It needs the drafts' full laws.
    """
    draft = question.draft
    for index, token in enumerate(draft.tokens):
        target = question.target_probs[index]
        if draft.draft_probs is None:
            proposed, probability = None, 1.0
        else:
            proposed = draft.draft_probs[index]
            probability = float(proposed[token])
        if choices.accept(min(1.0, float(target[token]) / probability)):
            continue
        return Verdict(index, choices.draw(_residual(target, proposed, token)))
    return Verdict(len(draft.tokens), choices.draw(question.target_probs[len(draft.tokens)]))


def _residual(target: Probabilities, proposed: Probabilities | None, token: int) -> Probabilities:
    """max(target - draft, 0), normalised. Empty only by rounding; the target itself then."""
    left = target.copy()
    if proposed is None:
        left[token] = 0.0
    else:
        left = np.maximum(left - proposed, 0.0)
    mass = left.sum()
    return left / mass if mass > 0.0 else target


def accept_topp_window(question: Question, choices: Choices) -> Verdict:
    """PaddleNLP's rule, lossy: a draft stands when it is among the candidates of its row.

    Candidates are the fewest best tokens whose mass reaches top_p, at most max_candidate_len.
    A draft that is not among them still stands when it is the row's second best and the next
    verify_window drafts are each the best of their row; the block then ends after the window.
    The last token is drawn from its row's candidates.
    """
    drafts, settings = question.draft.tokens, question.settings
    order = np.argsort(-question.target_probs, axis=-1, kind="stable")
    accepted = 0
    while accepted < len(drafts):
        candidates = _candidates(question, order, accepted)
        if drafts[accepted] in candidates:
            accepted += 1
            continue
        window = range(accepted + 1, accepted + 1 + settings.verify_window)
        if (
            drafts[accepted] == order[accepted, 1]
            and question.target_probs[accepted, drafts[accepted]] > 0.0
            and window.stop <= len(drafts)
            and all(drafts[index] == order[index, 0] for index in window)
        ):
            accepted = window.stop
        break
    kept = _candidates(question, order, accepted)
    law = np.zeros_like(question.target_probs[accepted])
    law[kept] = question.target_probs[accepted, kept]
    return Verdict(accepted, choices.draw(law / law.sum()))


def _candidates(
    question: Question, order: np.ndarray[tuple[int, ...], np.dtype[np.int64]], row: int
) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    best_first = question.target_probs[row, order[row]]
    reached = np.flatnonzero(np.cumsum(best_first) >= question.params.top_p - 1e-12)
    count = int(reached[0]) + 1 if len(reached) else len(best_first)
    return order[row, : min(count, question.settings.max_candidate_len)]


def accept_relaxed(question: Question, choices: Choices) -> Verdict:
    """TensorRT-LLM's relaxed rule, lossy: a draft among the relaxed_top_n best tokens stands when
    its probability is within relaxed_margin of the best one's."""
    drafts, settings = question.draft.tokens, question.settings
    for index, token in enumerate(drafts):
        target = question.target_probs[index]
        best = np.argsort(-target, kind="stable")[: settings.relaxed_top_n]
        if token not in best or target[token] < target[best[0]] - settings.relaxed_margin:
            return Verdict(index, choices.draw(target))
    return Verdict(len(drafts), choices.draw(question.target_probs[len(drafts)]))


ACCEPTANCE_RULES: dict[str, Rule] = {
    "exact": accept_exact,
    "topp_window": accept_topp_window,
    "relaxed": accept_relaxed,
}
