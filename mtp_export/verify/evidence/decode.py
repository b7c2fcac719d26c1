"""Run the engine over a loaded model, and record its proposals and outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from mtp_export.progress import CountCallback
from mtp_export.verify.evidence.prompts import Prompt
from mtp_runtime.acceptance.base import Draft, Verdict
from mtp_runtime.config import EngineConfig, SpeculationConfig
from mtp_runtime.drafters import DRAFTERS
from mtp_runtime.drafters.base import Drafter, DrafterParts, Pass
from mtp_runtime.engine import Engine
from mtp_runtime.judging import Group, Judge
from mtp_runtime.memory import state_pages
from mtp_runtime.models.model import Model
from mtp_runtime.request import Request, TokenEvent
from mtp_runtime.sampling import Probabilities, SamplingParams

Build = Callable[[DrafterParts], Drafter]
PAGE_SIZE = 16
PEAKS = 8  # tokens of a distribution that are kept


@dataclass(frozen=True)
class Peaks:
    """The likeliest tokens [n, p] of n draft distributions, and their probabilities [n, p]."""

    tokens: np.ndarray[Any, np.dtype[np.int64]]
    probs: Probabilities

    @classmethod
    def of(cls, draft: Draft) -> Peaks | None:
        """The peaks of a draft's reported distributions, None if it reports none."""
        probs = draft.draft_probs
        if probs is None:
            return None
        tokens = np.argsort(-probs, axis=-1)[:, :PEAKS]
        return cls(tokens, np.take_along_axis(probs, tokens, axis=-1))


@dataclass(frozen=True)
class Proposal:
    """Drafts for the tokens after position `last` of a request, and peaks of their
    distributions; logprobs as in Draft."""

    request: int
    last: int
    tokens: tuple[int, ...]
    peaks: Peaks | None = None
    logprobs: tuple[float, ...] = ()


@dataclass
class PassThroughDrafter:
    """Pass every call to another drafter; a subclass overrides the calls that it observes."""

    inner: Drafter

    def observe(self, passes: Sequence[Pass]) -> None:
        """Pass on what the target computed."""
        self.inner.observe(passes)

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Draft]:
        """Return the other drafter's proposals."""
        return self.inner.propose(requests, counts)

    def forget(self, request: Request) -> None:
        """Pass on that a request is forgotten."""
        self.inner.forget(request)


@dataclass
class Recorder(PassThroughDrafter):
    """Record another drafter's proposals."""

    proposals: list[Proposal] = field(default_factory=list)

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Draft]:
        drafts = super().propose(requests, counts)
        self.proposals += [
            Proposal(
                request=request.request_id,
                last=len(request.tokens) - 1,
                tokens=draft.tokens,
                peaks=Peaks.of(draft),
                logprobs=draft.logprobs,
            )
            for request, draft in zip(requests, drafts, strict=True)
        ]
        return drafts


@dataclass(frozen=True)
class Decoded:
    """A finished run: requests in the order of their prompts, token events, proposals."""

    requests: tuple[Request, ...]
    events: tuple[TokenEvent, ...]
    proposals: tuple[Proposal, ...]

    @property
    def outputs(self) -> list[tuple[int, ...]]:
        return [tuple(request.output) for request in self.requests]


@dataclass(frozen=True)
class Run:
    """An engine that has begun nothing yet, its requests in the order of their prompts, and what
    records its proposals."""

    engine: Engine
    requests: tuple[Request, ...]
    recorder: Recorder


def decode(
    model: Model,
    prompts: Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams],
    *,
    method: str = "none",
    k: int = 1,
    build: Build | None = None,
    draft_model: Model | None = None,
    at_once: int | None = None,
    advance: CountCallback = int,
) -> Decoded:
    """Decode prompts to their end; `build` replaces DRAFTERS[method], at_once is as in new_run,
    advance takes the number of tokens just decoded."""
    run = new_run(
        model,
        prompts,
        params,
        method=method,
        k=k,
        build=build,
        draft_model=draft_model,
        at_once=at_once,
    )
    return _ended(run, advance)


def decode_one_by_one(
    model: Model,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    k: int,
    advance: CountCallback = int,
) -> Decoded:
    """Decode prompts greedily, one token per step, so that there are k drafts of the MTP modules
    after every token, whatever would have been accepted; with log-probabilities of the tokens, two
    for each, and of the drafts. advance as in decode."""
    params = replace(params, logprobs=2)
    run = new_run(model, prompts, params, build=_with_logprobs, k=k)
    run.engine.judge = _NoneAccepted(run.engine.judge.head, run.engine.judge.settings)
    return _ended(run, advance)


def _ended(run: Run, advance: CountCallback) -> Decoded:
    """Decode the requests of a run to their end."""
    events = []
    for event in run.engine.run(run.requests):
        events.append(event)
        advance(1)
    return Decoded(run.requests, tuple(events), tuple(run.recorder.proposals))


def _with_logprobs(parts: DrafterParts) -> Drafter:
    """The drafter of the MTP modules, whose drafts come with their log-probabilities."""
    speculation = replace(parts.config.speculation, draft_logprobs=True)
    config = replace(parts.config, speculation=speculation)
    return DRAFTERS["mtp"].build(replace(parts, config=config))


class _NoneAccepted(Judge):
    """Takes the target's best token after the last one, and no draft."""

    def decide(self, group: Group, logits: torch.Tensor, best: list[int]) -> Verdict:
        return Verdict(0, best[0])


def new_run(
    model: Model,
    prompts: Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams],
    *,
    method: str = "none",
    k: int = 1,
    build: Build | None = None,
    draft_model: Model | None = None,
    at_once: int | None = None,
) -> Run:
    """Make an engine for prompts, whose requests are still to be added; `build` as in decode.
    at_once: the number of them that the cache has room for, by default all.

    Freed cache slots are filled with NaN, so that reading one shows.
    """
    speculation = SpeculationConfig("planted" if build else method, k)
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    pages = sorted(
        -(-(len(prompt) + own.max_tokens + k + 1) // PAGE_SIZE) + state_pages(model, PAGE_SIZE)
        for prompt, own in zip(prompts, each, strict=True)
    )
    config = EngineConfig(
        page_size=PAGE_SIZE,
        cache_tokens=sum(pages[-(at_once or len(pages)) :]) * PAGE_SIZE,
        poison_freed=True,
        speculation=speculation,
    )
    recorders: list[Recorder] = []

    def recording(parts: DrafterParts) -> Drafter:
        recorders.append(Recorder((build or DRAFTERS[method].build)(parts)))
        return recorders[0]

    engine = Engine(model, config, recording, draft_model)
    requests = tuple(
        Request(number, prompt, own, model.config.eos_token_ids)
        for number, (prompt, own) in enumerate(zip(prompts, each, strict=True))
    )
    return Run(engine, requests, recorders[0])
