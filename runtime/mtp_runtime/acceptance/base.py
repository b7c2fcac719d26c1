"""Interface of acceptance rules: pure functions of one request's block of drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mtp_runtime.config import SpeculationConfig
from mtp_runtime.logprobs import TokenLogprobs
from mtp_runtime.sampling import Choices, Probabilities, SamplingParams, probabilities_of

Logits = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True)
class Draft:
    """Proposed tokens, and the distribution each was drawn from [n, vocab]; None: certainty.

    logprobs: natural logarithms of the tokens' probabilities at temperature 1, none where the
    settings do not ask for them.
    """

    tokens: tuple[int, ...] = ()
    draft_probs: Probabilities | None = None
    logprobs: tuple[float, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """The first `accepted` drafts are accepted, and `last` follows them; logprobs are those of both
    where the request wants them."""

    accepted: int
    last: int
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True)
class Block:
    """Drafts to be judged. target_probs [n+1, vocab]: the target's distribution after 0 to n of
    them, as the rule's `distribution` makes it."""

    draft: Draft
    target_probs: Probabilities
    params: SamplingParams
    settings: SpeculationConfig


@dataclass(frozen=True)
class AcceptanceRule:
    """Acceptance of drafts, and what the engine computes for it.

    accept judges a block; its random decisions are Choices. distribution makes the target's
    probabilities [n, vocab] from logits [n, vocab] under a request's parameters. accept_greedy
    judges the drafts of a greedy request by the target's best tokens, one more than drafts, without
    any distribution; None: greedy requests are judged like all others.
    """

    accept: Callable[[Block, Choices], Verdict]
    distribution: Callable[[Logits, SamplingParams], Probabilities] = probabilities_of
    accept_greedy: Callable[[Sequence[int], Sequence[int]], Verdict] | None = None
