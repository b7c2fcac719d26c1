"""A model that is a table: the next token depends on the last one alone. The real engine, drafters
and acceptance run on it, so that their output distribution can be enumerated exactly."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch

from mtp_runtime.cache import LayerCaches
from mtp_runtime.config import EngineConfig, ModelConfig, SpeculationConfig
from mtp_runtime.drafters import DRAFTERS
from mtp_runtime.drafters.base import Drafter, DrafterParts
from mtp_runtime.engine import Engine
from mtp_runtime.models.model import Model, ModelCache, States
from mtp_runtime.request import Request
from mtp_runtime.sampling import Probabilities, SamplingParams, probabilities_of

VOCAB = 3
PROMPT = (0, 1, 0)
Build = Callable[[DrafterParts], Drafter]
Distribution = dict[tuple[int, ...], float]  # probability by output tokens


class Table:
    """A model with the interface of Model, its MTP module included.

    A hidden state is a one-hot token; logits [vocab, vocab] are those of the next token, by the
    last one.
    """

    def __init__(self, logits: torch.Tensor, mtp_logits: torch.Tensor | None = None) -> None:
        vocab = len(logits)
        self.table = logits
        self.config = ModelConfig(
            vocab=vocab,
            hidden=vocab,
            layers=1,
            norm_eps=0.0,
            max_positions=1 << 20,
            eos_token_ids=(),
            rope=None,
        )
        self.layers = (None,)
        self.embedding = torch.eye(vocab)
        self.device = self.embedding.device
        self.head = Head(logits)
        self.mtp_modules = () if mtp_logits is None else (Mtp(Head(mtp_logits)),)

    def new_cache(self, pages: Any) -> ModelCache:
        return ModelCache(LayerCaches(()), (LayerCaches(()),))

    def __call__(self, tokens: torch.Tensor, cache: Any, layout: Any) -> Any:
        hidden = self.embedding[tokens]
        return States(hidden, hidden, taps=hidden)

    def mtp_input(self, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        return after

    def next_probs(self, token: int, params: SamplingParams) -> Probabilities:
        """Probabilities [vocab] of the token after this one."""
        return probabilities_of(self.table[token].numpy(), params)


@dataclass(frozen=True)
class Head:
    """The final norm, which changes nothing, and the table."""

    table: torch.Tensor

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.table

    def best(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.logits(hidden).argmax(dim=-1)


@dataclass(frozen=True)
class Mtp:
    """An MTP module whose output is the token it was given, from which a recursion goes on."""

    head: Head
    recursion: None = None

    def __call__(self, tokens: torch.Tensor, hidden: torch.Tensor, *_: Any) -> torch.Tensor:
        return torch.eye(hidden.shape[1])[tokens]

    def recycled(self, x: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        return normed

    def new_cache(self, pages: Any) -> LayerCaches:
        return LayerCaches(())

    def combined(self, taps: torch.Tensor) -> torch.Tensor:
        """The states as an EAGLE-3 draft takes them."""
        return taps


@dataclass
class Branches:
    """Choices that walk through a tree of decisions depth-first, one leaf per run.

    path: branch taken and number of branches, per decision. probability: of the leaf.
    """

    path: list[tuple[int, int]]
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
        """Choices of the next leaf, None after the last."""
        path = list(self.path)
        while path and path[-1][0] + 1 == path[-1][1]:
            path.pop()
        if not path:
            return None
        path[-1] = (path[-1][0] + 1, path[-1][1])
        return replace(self, path=path, probability=1.0, step=0)


def tables(seed: int) -> tuple[Table, Table]:
    """A random target, and a random draft model that is the target's MTP module too."""
    generator = torch.Generator().manual_seed(seed)
    target, draft = (2 * torch.randn(VOCAB, VOCAB, generator=generator) for _ in range(2))
    return Table(target, draft), Table(draft)


def build_of(method: str) -> Build:
    """The builder of a method's drafter over tables. Drafts that are read from folders of their own
    are made of the target's MTP module."""
    return DRAFTERS[method].toy or DRAFTERS[method].build


def engine_of(target: Table, draft: Table, build: Build, **speculation: Any) -> Engine:
    """An engine over tables; `speculation` are further fields of SpeculationConfig."""
    settings = SpeculationConfig(method="draft_model", **speculation)
    config = EngineConfig(page_size=4, cache_tokens=64, poison_freed=True, speculation=settings)
    return Engine(cast(Model, target), config, build, cast(Model, draft))


def output_distribution(engine: Engine, params: SamplingParams) -> Distribution:
    """The probability of every output of the engine, over all decisions that it can take."""
    found: Distribution = {}
    choices: Branches | None = Branches([])
    while choices is not None:
        request = Request(0, PROMPT, params)
        request.choices = cast(Any, choices)
        for _ in engine.run([request]):
            pass
        output = tuple(request.output)
        found[output] = found.get(output, 0.0) + choices.probability
        choices = choices.following()
    return found


def target_distribution(target: Table, params: SamplingParams) -> Distribution:
    """The probability of every output under the target alone."""
    expected = {}
    for output in itertools.product(range(VOCAB), repeat=params.max_tokens):
        steps = zip((PROMPT[-1], *output), output, strict=False)
        expected[output] = math.prod(
            target.next_probs(before, params)[token] for before, token in steps
        )
    return expected


def distance(found: Distribution, expected: Distribution) -> float:
    """Total variation distance, from 0 to 1."""
    keys = found.keys() | expected.keys()
    return sum(abs(found.get(key, 0.0) - expected.get(key, 0.0)) for key in keys) / 2
