"""PaddleNLP's rule, which is lossy: a draft is accepted when it is among its row's candidates."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mtp_runtime.acceptance.base import AcceptanceRule, Block, Logits, Verdict
from mtp_runtime.sampling import Choices, Probabilities, SamplingParams, probabilities_of

TokenOrder = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


def accept_topp_window(block: Block, choices: Choices) -> Verdict:
    """Accept drafts among the fewest best tokens whose mass reaches top_p, at most
    max_candidate_len.

    A draft that is not among them is still accepted when it is the row's second best and the next
    verify_window drafts are each the best of their row; the block then ends after the window. The
    last token is drawn from its row's candidates.
    """
    drafts, settings = block.draft.tokens, block.settings
    order = np.argsort(-block.target_probs, axis=-1, kind="stable")
    accepted = 0
    while accepted < len(drafts):
        if drafts[accepted] in _candidates(block, order, accepted):
            accepted += 1
            continue
        window = range(accepted + 1, accepted + 1 + settings.verify_window)
        if (
            drafts[accepted] == order[accepted, 1]
            and block.target_probs[accepted, drafts[accepted]] > 0.0
            and window.stop <= len(drafts)
            and all(drafts[index] == order[index, 0] for index in window)
        ):
            accepted = window.stop
        break
    kept = _candidates(block, order, accepted)
    distribution = np.zeros_like(block.target_probs[accepted])
    distribution[kept] = block.target_probs[accepted, kept]
    return Verdict(accepted, choices.draw(distribution / distribution.sum()))


def _candidates(block: Block, order: TokenOrder, row: int) -> TokenOrder:
    best_first = block.target_probs[row, order[row]]
    reached = np.flatnonzero(np.cumsum(best_first) >= block.params.top_p - 1e-12)
    count = int(reached[0]) + 1 if len(reached) else len(best_first)
    return order[row, : min(count, block.settings.max_candidate_len)]


def before_top_p(logits: Logits, params: SamplingParams) -> Probabilities:
    """Return probabilities before top_p, at which the rule itself cuts: it looks at the second best
    token past the cut."""
    return probabilities_of(logits, replace(params, top_p=1.0))


TOPP_WINDOW = AcceptanceRule(accept_topp_window, distribution=before_top_p)
