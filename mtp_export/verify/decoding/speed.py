"""Check `speed`: cost and gain of speculation on this machine, by batch and k: v and c, the speedup
that they predict and the measured one; where it loses; the k to use.

v: duration of a target step with drafts over one of plain decoding. c: duration of one draft over
the same.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mtp_export.verify.check import Item, measured
from mtp_export.verify.context import Context
from mtp_export.verify.decoding.acceptance import conditional
from mtp_export.verify.evidence.corpus import Corpus
from mtp_export.verify.evidence.decode import Build, Decoded, PassThroughDrafter, decode
from mtp_export.verify.evidence.extra_drafts import ExtraDraft
from mtp_export.verify.evidence.prompts import Prompt
from mtp_runtime.acceptance.base import Draft
from mtp_runtime.drafters import DRAFTERS
from mtp_runtime.drafters.base import Drafter, DrafterParts, Pass
from mtp_runtime.models.model import Model
from mtp_runtime.request import Request
from mtp_runtime.sampling import SamplingParams

_BATCHES = (1, 4)
_MOST_TOKENS = 32
_PROMPT_TOKENS = 32
_TURNS = 3


@dataclass
class TimedDrafter(PassThroughDrafter):
    """Add up the time that another drafter takes."""

    seconds: float = 0.0

    def observe(self, passes: Sequence[Pass]) -> None:
        start = time.perf_counter()
        super().observe(passes)
        self.seconds += time.perf_counter() - start

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Draft]:
        start = time.perf_counter()
        drafts = super().propose(requests, counts)
        self.seconds += time.perf_counter() - start
        return drafts


@dataclass(frozen=True)
class Timing:
    """Duration of a run after its first token, and the output tokens and target steps in it."""

    seconds: float
    tokens: int
    steps: int
    drafting_seconds: float

    @property
    def per_token(self) -> float:
        return self.seconds / max(1, self.tokens)

    @property
    def per_step(self) -> float:
        return self.seconds / max(1, self.steps)


def run(context: Context) -> Iterator[Item]:
    """One item per batch and k, then the recommended k."""
    corpus = context.corpus
    best: dict[int, tuple[float, int]] = {}
    losses: list[str] = []
    for batch in [b for b in _BATCHES if b <= len(corpus.prompts)]:
        prompts = [p[:_PROMPT_TOKENS] for p in corpus.prompts[:batch]]
        for k in context.options.ks:
            plain, found = in_turns(corpus, prompts, k)
            gain = gain_of(plain, found)
            best[batch] = max(best.get(batch, (1.0, 0)), (gain, k))
            if gain < 1:
                losses.append(f"batch {batch} with k={k}")
            yield _speedup(expected_length(corpus, k), plain=plain, found=found, batch=batch, k=k)
    advice = ", ".join(f"k={k} ({gain:.2f}x) at batch {b}" for b, (gain, k) in best.items() if k)
    figure = f"use {advice}" if advice else "use none: every k was slower"
    if losses:
        figure += f"; loses at {', '.join(losses)}"
    data = {str(batch): {"k": k, "speedup": gain} for batch, (gain, k) in best.items()}
    yield measured("recommended k", figure, {"recommended": data})
    for extra in context.extra_drafts:
        yield from _of_extra(corpus, extra, context.options.ks)


def _of_extra(corpus: Corpus, extra: ExtraDraft, ks: Sequence[int]) -> Iterator[Item]:
    """One item per batch and k with an extra draft."""
    for batch in [b for b in _BATCHES if b <= len(corpus.prompts)]:
        prompts = [p[:_PROMPT_TOKENS] for p in corpus.prompts[:batch]]
        for k in ks:
            plain, found = in_turns(corpus, prompts, k, extra)
            length = length_of(extra.speculative(corpus.prompts, corpus.params, k), k)
            item = _speedup(length, plain=plain, found=found, batch=batch, k=k)
            data = {"method": extra.method, **item.data}
            yield measured(f"{extra.method}, {item.name}", item.figure, data)


def in_turns(
    corpus: Corpus, prompts: list[Prompt], k: int, extra: ExtraDraft | None = None
) -> tuple[Timing, Timing]:
    """Plain and speculative decoding, one right after the other, so that a machine that is slow for
    a while is slow for both; of a few such turns the one of median gain."""
    turns = [
        (_timed(corpus, prompts, None), _timed(corpus, prompts, _Way.of(corpus, extra, k)))
        for _ in range(_TURNS)
    ]
    return sorted(turns, key=lambda turn: gain_of(*turn))[_TURNS // 2]


@dataclass(frozen=True)
class _Way:
    """A way to decode with k drafts."""

    model: Model
    build: Build
    k: int

    @classmethod
    def of(cls, corpus: Corpus, extra: ExtraDraft | None, k: int) -> _Way:
        if extra is None:
            return cls(corpus.model, DRAFTERS["mtp"].build, k)
        return cls(extra.model, extra.draft.build, k)


def gain_of(plain: Timing, found: Timing) -> float:
    """The speedup of one run over the other."""
    return plain.per_token / found.per_token


def _timed(corpus: Corpus, prompts: list[Prompt], way: _Way | None) -> Timing:
    """The timing of one run, without prompts and first tokens; plain decoding without a way."""
    tokens = max(4, min(_MOST_TOKENS, corpus.new_tokens // 2))
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    timed: list[TimedDrafter] = []

    if way is None:
        decoded = decode(corpus.model, prompts, params)
    else:

        def build(parts: DrafterParts) -> Drafter:
            timed.append(TimedDrafter(way.build(parts)))
            return timed[0]

        decoded = decode(way.model, prompts, params, k=way.k, build=build)
    first = max(r.metrics.first_token_seconds for r in decoded.requests)
    last = max(r.metrics.finished_seconds for r in decoded.requests)
    output = max(r.metrics.output_tokens for r in decoded.requests) - 1
    steps = max(r.metrics.target_steps for r in decoded.requests) - 1
    drafting = timed[0].seconds if timed else 0.0
    return Timing(seconds=last - first, tokens=output, steps=steps, drafting_seconds=drafting)


def _speedup(length: float, *, plain: Timing, found: Timing, batch: int, k: int) -> Item:
    """The measured speedup, and the predicted E[L] / (v + k c)."""
    drafting = found.drafting_seconds / max(1, found.steps)
    v = max(0.0, found.per_step - drafting) / plain.per_step
    c = drafting / k / plain.per_step
    gain = gain_of(plain, found)
    predicted = length / (v + k * c) if v + c else float("nan")
    figure = f"{gain:.2f}x, predicted {predicted:.2f}x (v {v:.2f}, c {c:.3f}, E[L] {length:.2f})"
    data = {"batch": batch, "k": k, "measured": gain, "predicted": predicted, "v": v, "c": c}
    return measured(f"batch {batch}, k={k}", figure, data | {"expected_length": length})


def expected_length(corpus: Corpus, k: int) -> float:
    """Expected tokens per target step with the MTP module."""
    return length_of(corpus.speculative(k), k)


def length_of(decoded: Decoded, k: int) -> float:
    """Expected tokens per target step: 1 + the sum of the products of conditional acceptances."""
    total, reached = 1.0, 1.0
    for position in range(k):
        found = conditional(decoded, position)
        reached *= found.value if found is not None else 0.0
        total += reached
    return total
