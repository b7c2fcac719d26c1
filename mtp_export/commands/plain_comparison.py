"""Measured gain of speculation over plain decoding of the same prompts, by turns of both."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from mtp_export.busy_machine import Elapsed, Stopwatch, beyond_line, busy_line, is_beyond
from mtp_export.commands.decoding_figures import rate
from mtp_runtime import LLM, RequestOutput, SamplingParams
from mtp_runtime.prompts import Prompt

_TURNS = 3
_SECONDS = 10.0  # after which no further turn begins


@dataclass(frozen=True)
class Turn:
    """One decoding of all prompts with drafts and one without, next to each other."""

    drafted: list[RequestOutput]
    plain: list[RequestOutput]
    drafted_rate: float  # tokens per second
    plain_rate: float

    @property
    def has_same_tokens(self) -> bool:
        pairs = zip(self.drafted, self.plain, strict=True)
        return all(drafted.token_ids == plain.token_ids for drafted, plain in pairs)

    @property
    def tokens_per_step(self) -> float:
        """Output tokens per step of the target, with drafts."""
        metrics = [output.metrics for output in self.drafted]
        steps = sum(m.target_steps for m in metrics)
        return sum(m.output_tokens for m in metrics) / max(1, steps)


@dataclass(frozen=True)
class Comparison:
    """Turns of speculative and plain decoding, and what they took together."""

    turns: Sequence[Turn]
    elapsed: Elapsed
    is_greedy: bool

    @property
    def speedup(self) -> float:
        """Median of the turns' ratios of rates."""
        return median(turn.drafted_rate / turn.plain_rate for turn in self.turns)

    @property
    def plain_rate(self) -> float:
        """Tokens per second of plain decoding, the median of the turns."""
        return median(turn.plain_rate for turn in self.turns)

    @property
    def has_same_tokens(self) -> bool:
        return all(turn.has_same_tokens for turn in self.turns)

    @property
    def is_beyond(self) -> bool:
        """True for a speed-up that other load alone explains."""
        return is_beyond(self.speedup, median(turn.tokens_per_step for turn in self.turns))

    def as_json(self) -> dict[str, Any]:
        """Return the facts of a report; times are in seconds."""
        return {
            "turns": len(self.turns),
            "tokens_per_second": self.plain_rate,
            "speedup": self.speedup,
            "same_tokens": self.has_same_tokens,
            "too_busy": self.elapsed.is_busy or self.is_beyond,
            "waiting_for_processors": self.elapsed.waiting,
        }

    def lines(self, run: Elapsed) -> list[str]:
        """Return the comparison in words, after those on a run before it, whose rate is told unless
        it was busy: what cannot be told is said once. What samples draws other tokens with drafts,
        and of those nothing is said."""
        tokens = "same tokens" if self.has_same_tokens else "different tokens"
        is_busy = self.elapsed.is_busy
        rates = [busy_line(run, "the rate with drafts")] if run.is_busy and not is_busy else []
        if is_busy:
            gain = busy_line(self.elapsed, "rates and gain" if run.is_busy else "the gain")
        elif self.is_beyond:
            gain = beyond_line(self.speedup)
        else:
            gain = f"{self.speedup:.1f}x plain decoding ({rate(self.plain_rate)})"
            return [*rates, f"{gain}, {tokens}" if self.is_greedy else gain]
        return [*rates, gain, *([f"with drafts or without: {tokens}"] if self.is_greedy else [])]


def compared(llm: LLM, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> Comparison:
    """Decode prompts with drafts and plainly in turn, each as often as there is time for."""
    stopwatch, end = Stopwatch(), time.monotonic() + _SECONDS
    plainly = [replace(own, use_drafts=False) for own in params]
    turns: list[Turn] = []
    while len(turns) < _TURNS and (not turns or time.monotonic() < end):
        plain, plain_rate = _timed(llm, prompts, plainly)
        drafted, drafted_rate = _timed(llm, prompts, params)
        turns.append(Turn(drafted, plain, drafted_rate, plain_rate))
    return Comparison(turns, stopwatch.elapsed(), is_greedy=all(own.greedy for own in params))


def _timed(
    llm: LLM, prompts: Sequence[Prompt], params: Sequence[SamplingParams]
) -> tuple[list[RequestOutput], float]:
    """Return outputs, and their tokens per second."""
    start = time.perf_counter()
    outputs = llm.generate(prompts, params)
    tokens = sum(output.metrics.output_tokens for output in outputs)
    return outputs, tokens / (time.perf_counter() - start)
