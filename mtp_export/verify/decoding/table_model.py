"""A model whose law is a table: the next token depends on the last one alone. It goes through the
real engine, drafters and acceptance, so that their composed law can be worked out exactly."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from mtp_runtime.cache import LayerCaches
from mtp_runtime.config import EngineConfig, SpeculationConfig
from mtp_runtime.drafters.base import Drafter, DrafterParts
from mtp_runtime.engine import Engine
from mtp_runtime.models.model import Model, ModelCache
from mtp_runtime.request import Request
from mtp_runtime.sampling import Probabilities, SamplingParams, probabilities_of

VOCAB = 3
PROMPT = (0, 1, 0)
Law = dict[tuple[int, ...], float]


class Table:
    """Stands in for Model, its MTP module included; a hidden state is a one-hot token."""

    def __init__(self, logits: torch.Tensor, mtp_logits: torch.Tensor | None = None) -> None:
        vocab = len(logits)
        self.table = logits
        self.config: Any = SimpleNamespace(vocab=vocab, layers=1, max_positions=1 << 20)
        self.layers = (None,)
        self.embedding = torch.eye(vocab)
        self.device = self.embedding.device
        self.head = Head(logits)
        self.mtp_modules = () if mtp_logits is None else (Mtp(Head(mtp_logits)),)

    def new_cache(self, pages: Any) -> ModelCache:
        return ModelCache(LayerCaches(()), (LayerCaches(()),))

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
    recursion: None = None

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


def tables(seed: int) -> tuple[Table, Table]:
    """A random target, which holds the other as its MTP module, and that one as a draft model."""
    generator = torch.Generator().manual_seed(seed)
    target, draft = (2 * torch.randn(VOCAB, VOCAB, generator=generator) for _ in range(2))
    return Table(target, draft), Table(draft)


def engine_of(
    target: Table, draft: Table, build: Callable[[DrafterParts], Drafter], **speculation: Any
) -> Engine:
    """An engine over tables."""
    settings = SpeculationConfig(method="draft_model", **speculation)
    config = EngineConfig(page_size=4, cache_tokens=64, poison_freed=True, speculation=settings)
    return Engine(cast(Model, target), config, build, cast(Model, draft))


def law_of(engine: Engine, params: SamplingParams) -> Law:
    """The probability of every output, over all decisions that the engine can take."""
    law: Law = {}
    choices: Branches | None = Branches([])
    while choices is not None:
        request = Request(0, PROMPT, params)
        request.choices = cast(Any, choices)
        for _ in engine.run([request]):
            pass
        output = tuple(request.output)
        law[output] = law.get(output, 0.0) + choices.probability
        choices = choices.following()
    return law


def exact_law(target: Table, params: SamplingParams) -> Law:
    """What the target alone gives every output."""
    law = {}
    for output in itertools.product(range(VOCAB), repeat=params.max_tokens):
        steps = zip((PROMPT[-1], *output), output, strict=False)
        law[output] = math.prod(target.law(before, params)[token] for before, token in steps)
    return law


def distance(found: Law, expected: Law) -> float:
    """Total variation."""
    keys = found.keys() | expected.keys()
    return sum(abs(found.get(key, 0.0) - expected.get(key, 0.0)) for key in keys) / 2
