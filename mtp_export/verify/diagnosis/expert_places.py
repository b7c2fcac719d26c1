"""Experts and the rows of their router: an expert answers most to what its own row looks for, so
that rows in another order show in the weights alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from mtp_export.verify.diagnosis.causes import decoding as causes
from mtp_export.verify.diagnosis.tensor_variants import OF_MATRICES

# Experts of a layer that tell an order. Standard errors by which they answer to the rows in the
# order that is found, and by which they answer more to these than to the rows as they are: 3.7 to
# 6.0 in the trained fixture in good order, 2.1 and less in any other.
LEAST_EXPERTS, _LEAST_ERRORS, _LEAST_RISE = 8, 3.5, 3.5


@dataclass(frozen=True)
class Answer:
    """The share of an expert's squares that lies along each row of its router [e]: shares; expert:
    its number."""

    expert: int
    shares: torch.Tensor

    @classmethod
    def of(cls, expert: int, matrix: torch.Tensor, router: torch.Tensor) -> Answer:
        """Take gate or up [n, d] of an expert, or rows of both, and the router's rows [e, d]."""
        answers = (matrix @ (router - router.mean(0)).t()).square().sum(0)
        return cls(expert, (answers / matrix.square().sum().clamp_min(1e-30)).double())


def wrong_order(answers: Sequence[Answer]) -> str:
    """Return what is wrong with the rows of a layer's router, in words that follow its name; "" if
    no other order suits the experts far better."""
    if len(answers) < LEAST_EXPERTS:
        return ""
    logs = torch.stack([one.shares for one in answers]).clamp_min(1e-30).log()
    logs = logs - logs.mean(0) - logs.mean(1, keepdim=True) + logs.mean()
    errors = logs / logs.std().clamp_min(1e-12) / math.sqrt(len(answers))
    numbers = torch.tensor([one.expert for one in answers])
    places = torch.arange(len(answers))

    def suits(order: torch.Tensor) -> float:
        return float(errors[places, order[numbers]].sum())

    own = suits(torch.arange(logs.shape[1]))
    best, words = max((suits(order), words) for words, order in _orders(logs.shape[1]))
    return words if best >= _LEAST_ERRORS and best - own >= _LEAST_RISE else ""


def _orders(size: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what is wrong with the rows of a router of this size, and the order that mends it."""
    for change in OF_MATRICES:
        if change.rows is not None:
            yield causes.router_reordered(change.wrong), change.rows(size)
    for by, way in ((1, "on"), (-1, "back")):
        yield causes.router_rolled(way), torch.arange(size).roll(-by)
