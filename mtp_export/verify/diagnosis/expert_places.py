"""Experts and the rows of their router: an expert answers most to what its own row looks for, so
that rows in another order show in the weights alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median_high

import torch

from mtp_export.verify.diagnosis.causes import decoding as causes
from mtp_export.verify.diagnosis.tensor_variants import OF_MATRICES

# Experts of a layer that tell an order. Standard errors by which they answer to the rows in the
# order that is found, and by which they answer more to these than to the rows as they are: 3.7 to
# 6.0 in the trained fixture in good order, 2.1 and less in any other. Nothing is told of a model
# whose routers do not usually suit their experts as they are, nor by less than half of that.
LEAST_EXPERTS, _LEAST_ERRORS, _LEAST_RISE = 8, 3.5, 3.5
# Experts of one layer that answer to its rows by no more than this, where those of all other layers
# do, have a router that is not theirs.
_CHANCE_ERRORS, _LEAST_OTHERS = 2.0, 2


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


def wrong_orders(layers: Sequence[Sequence[Answer]]) -> list[str]:
    """Return what is wrong with the rows of each layer's router, in words that follow its name; ""
    where no other order suits the experts far better, and the rows do no worse than by chance. One
    layer alone tells nothing."""
    found = [_suiting(answers) for answers in layers]
    own = [suits[0][0] for suits in found if suits]
    usual = median_high(own) if len(own) > 1 else 0.0
    if usual < _LEAST_ERRORS:
        return [""] * len(layers)
    words = [_better(suits, max(_LEAST_ERRORS, usual / 2)) if suits else "" for suits in found]
    least, second, *others = sorted(own)
    if least <= _CHANCE_ERRORS and second >= _LEAST_ERRORS and len(others) + 1 >= _LEAST_OTHERS:
        number = next(n for n, suits in enumerate(found) if suits and suits[0][0] == least)
        if not words[number]:  # an order in which some experts are in their places rises less
            words[number] = _better(found[number], _LEAST_ERRORS, rise=0.0) or causes.ROUTER_APART
    return words


def _better(suits: Sequence[tuple[float, str]], least: float, rise: float = _LEAST_RISE) -> str:
    """Return the words of the order that suits best, "" where it does not by far."""
    own, (best, words) = suits[0][0], max(suits[1:])
    return words if best >= least and best - own >= rise else ""


def _suiting(answers: Sequence[Answer]) -> list[tuple[float, str]]:
    """Return by how many standard errors experts answer to the rows of their router as these are,
    then in each other order, with what would be wrong; nothing of few experts."""
    if len(answers) < LEAST_EXPERTS:
        return []
    logs = torch.stack([one.shares for one in answers]).clamp_min(1e-30).log()
    logs = logs - logs.mean(0) - logs.mean(1, keepdim=True) + logs.mean()
    errors = logs / logs.std().clamp_min(1e-12) / math.sqrt(len(answers))
    numbers = torch.tensor([one.expert for one in answers])
    places = torch.arange(len(answers))
    size = logs.shape[1]
    orders = [("", torch.arange(size)), *_orders(size)]
    return [(float(errors[places, order[numbers]].sum()), words) for words, order in orders]


def _orders(size: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what is wrong with the rows of a router of this size, and the order that mends it."""
    for change in OF_MATRICES:
        if change.rows is not None:
            yield causes.router_reordered(change.wrong), change.rows(size)
    for by in range(1, size):
        moved = by if by <= size // 2 else by - size
        yield causes.router_rolled(moved), torch.arange(size).roll(-by)
