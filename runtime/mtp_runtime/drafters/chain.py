"""Turns a draft model's logits into drafts: its best token, or one drawn from its distribution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from mtp_runtime.acceptance.base import Draft
from mtp_runtime.request import Request
from mtp_runtime.sampling import Probabilities, one_hot, probabilities_of


@dataclass
class Chain:
    """Growing drafts of one request."""

    request: Request
    count: int
    tokens: list[int] = field(default_factory=list)
    distributions: list[Probabilities] = field(default_factory=list)

    def draft(self) -> Draft:
        return Draft(
            tuple(self.tokens), np.stack(self.distributions) if self.distributions else None
        )


def extend(chains: Sequence[Chain], logits: torch.Tensor, sample: bool) -> None:
    """Append one token to every chain from its row of logits [b, vocab].

    A greedy request gets the best token and no distribution. A sampling one draws from the draft's
    own distribution under the request's temperature, top_k and top_p, or takes the best token with
    certainty where `sample` is False.
    """
    best = logits.argmax(dim=-1).tolist()
    rows = None
    for row, chain in enumerate(chains):
        request = chain.request
        if request.params.greedy:
            chain.tokens.append(best[row])
            continue
        if not sample:
            chain.tokens.append(best[row])
            chain.distributions.append(one_hot(best[row], logits.shape[-1]))
            continue
        rows = logits.float().cpu().numpy() if rows is None else rows
        distribution = probabilities_of(rows[row], request.params)
        chain.tokens.append(request.choices.draw(distribution))
        chain.distributions.append(distribution)
