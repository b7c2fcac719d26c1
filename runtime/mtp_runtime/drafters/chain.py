"""Drafts from a draft model's logits: its best token, or one drawn from its distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from mtp_runtime.acceptance.base import Draft
from mtp_runtime.config import SpeculationConfig
from mtp_runtime.drafters.base import Drafter
from mtp_runtime.models.execution import Head
from mtp_runtime.request import Request
from mtp_runtime.sampling import Probabilities, SamplingParams, probabilities_of


@dataclass
class Chain:
    """Growing drafts of one request, up to a count of them."""

    request: Request
    count: int
    tokens: list[int] = field(default_factory=list)
    distributions: list[Probabilities] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        return len(self.tokens) >= self.count

    def draft(self) -> Draft:
        distributions = np.stack(self.distributions) if self.distributions else None
        return Draft(tuple(self.tokens), distributions, tuple(self.logprobs))


class ChainDrafter(Drafter):
    """Drafts by a chain per request, which subclasses grow."""

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Draft]:
        chains = [Chain(request, n) for request, n in zip(requests, counts, strict=True)]
        growing = [chain for chain in chains if not chain.is_whole]
        if growing:
            self.grow(growing)
        return [chain.draft() for chain in chains]

    def grow(self, chains: list[Chain]) -> None:
        """Grow every chain to its count, or to where it ends by itself."""
        raise NotImplementedError


def take_best(chains: Sequence[Chain], settings: SpeculationConfig) -> bool:
    """Return True where all chains take the best tokens, and nothing else of a head."""
    only_best = math.isinf(settings.draft_stop_entropy) and not settings.draft_logprobs
    return only_best and all(chain.request.params.greedy for chain in chains)


def grow(
    chains: Sequence[Chain], head: Head, normed: torch.Tensor, settings: SpeculationConfig
) -> None:
    """Append one token to every chain from its row [b, d], which passed the head's norm.

    Nothing but the best tokens is asked of the head where that is all that the chains take.
    """
    if not take_best(chains, settings):
        extend(chains, head.logits(normed), settings)
        return
    for chain, token in zip(chains, head.best(normed).tolist(), strict=True):
        chain.tokens.append(token)


def extend(chains: Sequence[Chain], logits: torch.Tensor, settings: SpeculationConfig) -> None:
    """Append one token to every chain from its row of logits [b, vocab], or end the chain.

    A greedy request gets the best token and no distribution. A sampling one draws from the draft's
    own distribution under the request's top_k and top_p, and the temperature of the settings or its
    own. A chain ends before its next token where the entropy is above draft_stop_entropy: that is
    known before the token is drawn, so that the output's distribution stays the target's.
    """
    best = logits.argmax(dim=-1).tolist()
    stops = math.isfinite(settings.draft_stop_entropy)
    rows = None
    for row, chain in enumerate(chains):
        params = chain.request.params
        if params.greedy and not stops:
            chain.tokens.append(best[row])
            continue
        rows = logits.float().cpu().numpy() if rows is None else rows
        drawn = _params_of_draft(params, len(chain.tokens), settings)
        distribution = probabilities_of(rows[row], drawn)
        if stops and _entropy(distribution) > settings.draft_stop_entropy:
            chain.count = len(chain.tokens)
        elif params.greedy:
            chain.tokens.append(best[row])
        else:
            chain.tokens.append(chain.request.choices.draw(distribution))
            chain.distributions.append(distribution)
    if settings.draft_logprobs:
        _note_logprobs(chains, logits)


def _note_logprobs(chains: Sequence[Chain], logits: torch.Tensor) -> None:
    """Note the log-probability of the token that each chain got from its row of logits [b, vocab];
    one that ended got none."""
    rows = logits.float().log_softmax(dim=-1)
    for row, chain in zip(rows, chains, strict=True):
        if len(chain.logprobs) < len(chain.tokens):
            chain.logprobs.append(float(row[chain.tokens[-1]]))


def _params_of_draft(
    params: SamplingParams, position: int, settings: SpeculationConfig
) -> SamplingParams:
    """Return the parameters of a draft; the entropy of greedy ones is that at temperature 1."""
    if params.greedy:
        return replace(params, temperature=1.0)
    if not settings.draft_temperature:
        return params
    last = len(settings.draft_temperature) - 1
    return replace(params, temperature=settings.draft_temperature[min(position, last)])


def _entropy(distribution: Probabilities) -> float:
    """Return the entropy of a distribution [vocab] in nats."""
    likely = distribution[distribution > 0.0]
    return float(-(likely * np.log(likely)).sum())
