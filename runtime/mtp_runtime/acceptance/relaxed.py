"""TensorRT-LLM's relaxed rule, which is lossy: near misses are accepted."""

from __future__ import annotations

import numpy as np

from mtp_runtime.acceptance.base import AcceptanceRule, Block, Verdict
from mtp_runtime.sampling import Choices


def accept_relaxed(block: Block, choices: Choices) -> Verdict:
    """Accept a draft among the relaxed_top_n best tokens whose probability is within relaxed_margin
    of the best one's."""
    drafts, settings = block.draft.tokens, block.settings
    for index, token in enumerate(drafts):
        target = block.target_probs[index]
        best = np.argsort(-target, kind="stable")[: settings.relaxed_top_n]
        if token not in best or target[token] < target[best[0]] - settings.relaxed_margin:
            return Verdict(index, choices.draw(target))
    return Verdict(len(drafts), choices.draw(block.target_probs[len(drafts)]))


RELAXED = AcceptanceRule(accept_relaxed)
