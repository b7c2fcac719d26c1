"""Log-probabilities of tokens under the target's own logits, as vLLM reports them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithm of a token's probability, and the most probable tokens in its place, best
    first; of equal ones the lower id."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def token_logprobs(
    logits: torch.Tensor, tokens: Sequence[int], count: int
) -> tuple[TokenLogprobs, ...]:
    """Return the log-probability of each token under its row of logits [n, vocab], and those of
    the `count` most probable tokens."""
    rows = logits.float().log_softmax(dim=-1)
    of_tokens = rows.gather(1, torch.tensor(tokens, device=rows.device)[:, None])[:, 0].tolist()
    order = rows.argsort(dim=-1, descending=True, stable=True)[:, :count]
    best, values = order.tolist(), rows.gather(1, order).tolist()
    return tuple(
        TokenLogprobs(token, logprob, tuple(zip(best[row], values[row], strict=True)))
        for row, (token, logprob) in enumerate(zip(tokens, of_tokens, strict=True))
    )
