"""Runs an engine over a loaded model, and keeps what was drafted and what came out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mtp_export.verify.evidence.prompts import Prompt
from mtp_runtime.acceptance.base import Draft
from mtp_runtime.config import EngineConfig, SpeculationConfig
from mtp_runtime.drafters import DRAFTERS
from mtp_runtime.drafters.base import Drafter, DrafterParts, Pass
from mtp_runtime.engine import Engine
from mtp_runtime.models.model import Model
from mtp_runtime.request import Request, TokenEvent
from mtp_runtime.sampling import Probabilities, SamplingParams

Build = Callable[[DrafterParts], Drafter]
PAGE_SIZE = 16
PEAKS = 8  # of a law that are kept


@dataclass(frozen=True)
class Peaks:
    """The likeliest tokens [n, p] of each draft's law, and their probabilities [n, p]."""

    tokens: np.ndarray[Any, np.dtype[np.int64]]
    probs: Probabilities

    @classmethod
    def of(cls, draft: Draft) -> Peaks | None:
        """None where the draft reports no law."""
        laws = draft.draft_probs
        if laws is None:
            return None
        tokens = np.argsort(-laws, axis=-1)[:, :PEAKS]
        return cls(tokens, np.take_along_axis(laws, tokens, axis=-1))


@dataclass(frozen=True)
class Proposal:
    """Drafts for the tokens after position `last` of a request, and their laws' peaks."""

    request: int
    last: int
    tokens: tuple[int, ...]
    peaks: Peaks | None = None


@dataclass
class Recorder:
    """A drafter that hands on what another one does, and notes its proposals."""

    inner: Drafter
    proposals: list[Proposal] = field(default_factory=list)

    def observe(self, passes: Sequence[Pass]) -> None:
        self.inner.observe(passes)

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Draft]:
        drafts = self.inner.propose(requests, counts)
        self.proposals += [
            Proposal(request.request_id, len(request.tokens) - 1, draft.tokens, Peaks.of(draft))
            for request, draft in zip(requests, drafts, strict=True)
        ]
        return drafts

    def forget(self, request: Request) -> None:
        self.inner.forget(request)


@dataclass(frozen=True)
class Decoded:
    """What became of some prompts, in order."""

    requests: tuple[Request, ...]
    events: tuple[TokenEvent, ...]
    proposals: tuple[Proposal, ...]

    @property
    def outputs(self) -> list[tuple[int, ...]]:
        return [tuple(request.output) for request in self.requests]


def decode(
    model: Model,
    prompts: Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams],
    *,
    method: str = "none",
    k: int = 1,
    build: Build | None = None,
    draft_model: Model | None = None,
    **settings: Any,
) -> Decoded:
    """Decode prompts to their end; `build` stands in for DRAFTERS[method].build.

    Freed cache slots are filled with NaN, so that reading one shows. `settings` are EngineConfig's.
    """
    speculation = SpeculationConfig("planted" if build else method, k)
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    needed = sum(
        -(-(len(prompt) + own.max_tokens + k + 1) // PAGE_SIZE)
        for prompt, own in zip(prompts, each, strict=True)
    )
    config = EngineConfig(
        page_size=PAGE_SIZE,
        cache_tokens=needed * PAGE_SIZE,
        poison_freed=True,
        speculation=speculation,
    )
    recorders: list[Recorder] = []

    def recording(parts: DrafterParts) -> Drafter:
        recorders.append(Recorder((build or DRAFTERS[method].build)(parts)))
        return recorders[0]

    engine = Engine(model, replace(config, **settings), recording, draft_model)
    requests = tuple(
        Request(number, prompt, own, model.config.eos_token_ids)
        for number, (prompt, own) in enumerate(zip(prompts, each, strict=True))
    )
    events = tuple(engine.run(requests))
    return Decoded(requests, events, tuple(recorders[0].proposals))
