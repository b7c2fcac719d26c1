"""A model whose law is a table: the next token depends on the last one alone. It goes through the
real engine, drafters and acceptance, so that their composed law can be worked out exactly."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from mtp_runtime.sampling import Probabilities, SamplingParams, probabilities_of


class Table:
    """Stands in for DeepseekV3, its MTP module included; a hidden state is a one-hot token."""

    def __init__(self, logits: torch.Tensor, mtp_logits: torch.Tensor | None = None) -> None:
        vocab = len(logits)
        self.table = logits
        self.config: Any = SimpleNamespace(
            vocab=vocab, latent=1, rope=SimpleNamespace(size=1), layers=1, max_positions=1 << 20
        )
        self.layers = (None,)
        self.embedding = torch.eye(vocab)
        self.device = self.embedding.device
        self.head = Head(logits)
        self.mtp = None if mtp_logits is None else Mtp(Head(mtp_logits))
        self.cache_layers = 2

    def __call__(self, tokens: torch.Tensor, cache: Any, layout: Any) -> Any:
        hidden = self.embedding[tokens]
        return hidden, hidden

    def mtp_input(self, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        return after

    def law(self, token: int, params: SamplingParams) -> Probabilities:
        return probabilities_of(self.table[token].numpy(), params)


@dataclass(frozen=True)
class Head:
    table: torch.Tensor

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.table


@dataclass(frozen=True)
class Mtp:
    """Its output is the token it was given, so that a recursion goes on from it."""

    head: Head

    def __call__(self, tokens: torch.Tensor, hidden: torch.Tensor, *_: Any) -> torch.Tensor:
        return torch.eye(hidden.shape[1])[tokens]

    def recycled(self, x: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        return normed


@dataclass
class Branches:
    """Choices that walk through a tree of decisions, one leaf a run, in depth-first order."""

    path: list[tuple[int, int]]  # (branch taken, branches there are) for each decision
    probability: float = 1.0
    step: int = 0

    def accept(self, probability: float) -> bool:
        return self._take(np.array([1.0 - probability, probability])) == 1

    def draw(self, probabilities: Probabilities) -> int:
        assert abs(probabilities.sum() - 1.0) < 1e-9 and (probabilities >= 0).all()
        return self._take(probabilities)

    def _take(self, probabilities: Probabilities) -> int:
        possible = np.flatnonzero(probabilities > 0)
        if self.step == len(self.path):
            self.path.append((0, len(possible)))
        branch = int(possible[self.path[self.step][0]])
        self.step += 1
        self.probability *= float(probabilities[branch])
        return branch

    def following(self) -> Branches | None:
        """The next leaf's choices, None after the last."""
        path = list(self.path)
        while path and path[-1][0] + 1 == path[-1][1]:
            path.pop()
        if not path:
            return None
        path[-1] = (path[-1][0] + 1, path[-1][1])
        return replace(self, path=path, probability=1.0, step=0)
