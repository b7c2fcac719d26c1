"""Check `speed`: cost and gain of speculation on this machine, by batch and k: v and c, the speedup
that they predict and the measured one; where it loses; the k to use.

v: duration of a target step with drafts over one of plain decoding. c: duration of one draft over
the same.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median, quantiles

from mtp_export.busy_machine import LEAST_COST, TOO_BUSY, is_beyond
from mtp_export.verify.check import Item, measured, not_tested
from mtp_export.verify.context import Context
from mtp_export.verify.decoding.acceptance import accepted_length, conditional
from mtp_export.verify.evidence.corpus import Corpus
from mtp_export.verify.evidence.decode import (
    Build,
    Decoded,
    PassThroughDrafter,
    Run,
    new_run,
)
from mtp_export.verify.evidence.extra_drafts import ExtraDraft
from mtp_export.verify.evidence.prompts import Prompt
from mtp_export.verify.evidence.statistics import Estimate
from mtp_runtime.acceptance.base import Draft
from mtp_runtime.drafters import DRAFTERS
from mtp_runtime.drafters.base import Drafter, DrafterParts, Pass
from mtp_runtime.models.draft_cost import DraftCost
from mtp_runtime.models.load import LoadOptions, open_model
from mtp_runtime.models.model import Model
from mtp_runtime.request import Request
from mtp_runtime.sampling import SamplingParams

_BATCHES = (1, 4)
_MOST_TOKENS = 32
_PROMPT_TOKENS = 32
_TURNS = 5
_CONTRADICTED = f"{TOO_BUSY}: drafts came out cheaper than they can be"


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
class Way:
    """A way to decode, with k drafts per step; plain decoding has no drafter to build."""

    model: Model
    build: Build | None = None
    k: int = 1

    @classmethod
    def of(cls, corpus: Corpus, extra: ExtraDraft | None, k: int) -> Way:
        """Return the way with the corpus's own drafts, or with an extra draft."""
        own = extra or corpus.draft
        if own is None:
            return cls(corpus.model, DRAFTERS["mtp"].build, k)
        return cls(own.model, own.draft.build, k)


@dataclass
class Pace:
    """Steps of a way to decode, each beside the step of plain decoding that was next to it.

    ratios: the step's duration over the plain one's. drafting: that of its drafts over the same.
    tokens: output tokens of all steps, per request.
    """

    k: int
    ratios: list[float] = field(default_factory=list)
    drafting: list[float] = field(default_factory=list)
    tokens: float = 0.0

    @property
    def _steps(self) -> Iterator[tuple[float, float]]:
        return zip(self.ratios, self.drafting, strict=True)

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / len(self.ratios)

    @property
    def c(self) -> float:
        return median(self.drafting) / self.k

    @property
    def v(self) -> float:
        return median(ratio - drafting for ratio, drafting in self._steps)

    @property
    def gain(self) -> float:
        """The speedup over plain decoding."""
        return self.tokens_per_step / median(self.ratios)

    @property
    def spread(self) -> tuple[float, float]:
        """Quartiles of the speedup by single steps."""
        ratios = self.ratios if len(self.ratios) > 1 else self.ratios * 2  # one has no quantiles
        low, _, high = quantiles(ratios, n=4, method="inclusive")
        return self.tokens_per_step / high, self.tokens_per_step / low

    @property
    def contradicts(self) -> bool:
        """True for figures that other load alone explains: a step with drafts that is cheaper than
        one without, and so a speedup above the tokens per step."""
        return self.v < LEAST_COST or is_beyond(self.gain, self.tokens_per_step)


@dataclass
class _TimedRun:
    """A run that goes on step by step, each of which is timed."""

    run: Run
    drafter: list[TimedDrafter]

    @classmethod
    def of(cls, way: Way, prompts: Sequence[Prompt], params: SamplingParams) -> _TimedRun:
        timed: list[TimedDrafter] = []

        def build(parts: DrafterParts) -> Drafter:
            assert way.build is not None
            timed.append(TimedDrafter(way.build(parts)))
            return timed[0]

        run = new_run(way.model, prompts, params, k=way.k, build=build if way.build else None)
        for request in run.requests:
            run.engine.add(request)
        return cls(run, timed)

    @property
    def output_tokens(self) -> int:
        return sum(len(request.output) for request in self.run.requests)

    def step(self) -> tuple[float, float] | None:
        """Run a step; return its seconds and those of drafting, None for one that did not decode
        every request."""
        requests = self.run.requests
        if not self.run.engine.has_work:
            return None
        decodes = all(request.output and request.finish_reason is None for request in requests)
        before = sum(timed.seconds for timed in self.drafter)
        start = time.perf_counter()
        self.run.engine.step()
        seconds = time.perf_counter() - start
        drafting = sum(timed.seconds for timed in self.drafter) - before
        return (seconds, drafting) if decodes else None


def run(context: Context) -> Iterator[Item]:
    """One item per batch and k, then the recommended k."""
    corpus, ks = context.corpus, context.options.ks
    cost = _draft_cost(context)
    gains: dict[int, list[Gain]] = {}
    losses, unknown = list[str](), list[str]()
    for batch in _batches(corpus):
        for pace in paces(corpus, batch, [Way.of(corpus, None, k) for k in ks]):
            k = pace.k
            expected = expected_length(corpus, k)
            yield with_bytes(speedup(f"batch {batch}, k={k}", expected, pace, batch=batch), cost)
            if not pace.ratios or pace.contradicts:
                unknown.append(f"batch {batch} with k={k}")
                continue
            length = accepted_length(corpus.speculative(k))
            gains.setdefault(batch, []).append(Gain.of(pace, length))
            if pace.gain < 1:
                losses.append(f"batch {batch} with k={k}")
    yield _recommended(gains, losses, unknown)
    for extra in context.extra_drafts:
        yield from _of_extra(corpus, extra, ks)


@dataclass(frozen=True)
class Gain:
    """Speedup by k drafts, and what it would be at the ends of the 95 % interval of the tokens that
    they bring per step; plain decoding is k = 0."""

    k: int = 0
    value: float = 1.0
    low: float = 1.0
    high: float = 1.0

    @classmethod
    def of(cls, pace: Pace, length: Estimate | None) -> Gain:
        """Return the gain of a pace. length: tokens per step over all prompts; without an interval,
        as of a single prompt, none or all of the drafts may be accepted."""
        least, most = 1.0, 1.0 + pace.k
        if length is None or length.low is None or length.high is None:
            value, low, high = pace.tokens_per_step, least, most
        else:
            value, low, high = length.value, max(length.low, least), min(length.high, most)
        return cls(pace.k, pace.gain, pace.gain * low / value, pace.gain * high / value)


@dataclass(frozen=True)
class _Best:
    """The fastest number of drafts at a batch, and those that are the fastest at an end of the
    intervals: too few prompts tell it from them."""

    batch: int
    gain: Gain
    others: Sequence[int]

    @classmethod
    def of(cls, batch: int, gains: Sequence[Gain]) -> _Best:
        known = [Gain(), *gains]
        best = max(known, key=lambda gain: gain.value)
        ends = {
            max(known, key=lambda gain: gain.low).k,
            max(known, key=lambda gain: gain.high).k,
        }
        return cls(batch, best, sorted(ends - {best.k}))

    @property
    def name(self) -> str:
        return f"k={self.gain.k} ({self.gain.value:.2f}x)" if self.gain.k else "none"

    @property
    def rest(self) -> str:
        """The others in words."""
        return " and ".join(f"k={k}" if k else "none" for k in self.others)

    def as_json(self) -> dict[str, object]:
        untold = {"not_told_from": list(self.others)} if self.others else {}
        return {"k": self.gain.k, "speedup": self.gain.value, **untold}


def _recommended(
    gains: Mapping[int, Sequence[Gain]], losses: Sequence[str], unknown: Sequence[str]
) -> Item:
    """The best k of each batch, of those whose figures are sound: as a recommendation where the
    prompts are enough to tell it from all others."""
    name = "recommended k"
    if not gains:
        return not_tested(name, _CONTRADICTED)
    bests = [_Best.of(batch, found) for batch, found in gains.items()]
    told = [best for best in bests if not best.others]
    advice = ", ".join(f"{best.name} at batch {best.batch}" for best in told if best.gain.k)
    figures = [f"use {advice}" if advice else "use none: every k was slower"] if told else []
    rough = [f"{b.name} from {b.rest} at batch {b.batch}" for b in bests if b.others]
    if rough:
        figures.append(f"too few prompts to tell {', '.join(rough)}: give more by --prompts")
    if losses:
        figures.append(f"loses at {', '.join(losses)}")
    if unknown:
        figures.append(f"{TOO_BUSY} of {', '.join(unknown)}")
    data = {str(best.batch): best.as_json() for best in bests}
    return measured(name, "; ".join(figures), {"recommended": data})


def _batches(corpus: Corpus) -> list[int]:
    return [batch for batch in _BATCHES if batch <= len(corpus.prompts)]


def _of_extra(corpus: Corpus, extra: ExtraDraft, ks: Sequence[int]) -> Iterator[Item]:
    """One item per batch and k with an extra draft."""
    for batch in _batches(corpus):
        for pace in paces(corpus, batch, [Way.of(corpus, extra, k) for k in ks]):
            k = pace.k
            length = length_of(extra.speculative(corpus.prompts, corpus.params, k), k)
            name = f"{extra.method}, batch {batch}, k={k}"
            yield speedup(name, length, pace, batch=batch, method=extra.method)


def paces(corpus: Corpus, batch: int, ways: Sequence[Way]) -> list[Pace]:
    """Decode some prompts in several ways, which take turns step by step with plain decoding: what
    slows the machine down for a while slows all of them, and medians leave it out."""
    prompts = [prompt[:_PROMPT_TOKENS] for prompt in corpus.prompts[:batch]]
    tokens = max(4, min(_MOST_TOKENS, corpus.new_tokens // 2))
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    found = [Pace(way.k) for way in ways]
    with corpus.show_count(f"speed at batch {batch}", _TURNS, "turns") as advance:
        for _ in range(_TURNS):
            each = (Way(corpus.model), *ways)
            plain, *others = (_TimedRun.of(way, prompts, params) for way in each)
            _take_turn(plain, others, found, batch)
            advance(1)
    return found


def _take_turn(
    plain: _TimedRun, others: Sequence[_TimedRun], found: Sequence[Pace], batch: int
) -> None:
    """Step all ways side by side until plain decoding ends, and add to their paces."""
    while plain.run.engine.has_work:
        base = plain.step()
        for pace, other in zip(found, others, strict=True):
            before = other.output_tokens
            step = other.step()
            if base is not None and step is not None:
                pace.ratios.append(step[0] / base[0])
                pace.drafting.append(step[1] / base[0])
                pace.tokens += (other.output_tokens - before) / batch


def speedup(name: str, length: float, pace: Pace, **labels: object) -> Item:
    """The measured speedup with its spread, and the predicted E[L] / (v + k c)."""
    if not pace.ratios:
        return not_tested(name, "no step decodes every prompt: give a larger --max-new-tokens")
    k, v, c, gain, (low, high) = pace.k, pace.v, pace.c, pace.gain, pace.spread
    predicted = length / (v + k * c) if v + c > 0 else float("nan")
    figure = (
        f"{gain:.2f}x [{low:.2f}, {high:.2f}], predicted {predicted:.2f}x (v {v:.2f}, c {c:.3f},"
        f" E[L] {length:.2f})"
    )
    data = {**labels, "k": k, "measured": gain, "predicted": predicted, "v": v, "c": c}
    data |= {"expected_length": length, "low": low, "high": high}
    if pace.contradicts:
        return not_tested(name, _CONTRADICTED, figure=figure, data=data)
    return measured(name, figure, data)


def _draft_cost(context: Context) -> DraftCost | None:
    """Return the cost of drafts of the model that is verified, by bytes."""
    options = LoadOptions(context.options.device, mtp_folder=context.mtp_folder)
    opened = open_model(context.folder, options, packs=options.compiled)
    return opened.memory_plan(options).drafts


def with_bytes(item: Item, cost: DraftCost | None) -> Item:
    """Return a measured speedup beside the one that bytes of weights predict, E[L] over those of a
    step; another item, and one of drafts without MTP modules, as it is."""
    if cost is None or not item.data:
        return item
    k, batch, length = (item.data[name] for name in ("k", "batch", "expected_length"))
    v, c = cost.v(k, batch), cost.c(batch)
    found = {"predicted_by_bytes": length / cost.step(k, batch), "v_by_bytes": v, "c_by_bytes": c}
    words = f", {found['predicted_by_bytes']:.2f}x by bytes touched (v {v:.2f}, c {c:.3f})"
    return replace(item, figure=item.figure + words, data={**item.data, **found})


def expected_length(corpus: Corpus, k: int) -> float:
    """Expected tokens per target step with the corpus's own drafts."""
    return length_of(corpus.speculative(k), k)


def length_of(decoded: Decoded, k: int) -> float:
    """Expected tokens per target step: 1 + the sum of the products of conditional acceptances."""
    total, reached = 1.0, 1.0
    for position in range(k):
        found = conditional(decoded, position)
        reached *= found.value if found is not None else 0.0
        total += reached
    return total
