"""Distribution of the output: drafter, acceptance and bonus token composed, worked out exactly on a
tiny vocabulary and by chi-square on the trained fixture."""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, cast

import numpy as np
import pytest
import torch

from cases import nightly_but
from mtp_export.verify.evidence.decode import PassThroughDrafter
from mtp_export.verify.evidence.statistics import critical_chi_square
from mtp_runtime.acceptance.base import Draft
from mtp_runtime.drafters import DRAFTERS
from mtp_runtime.drafters.base import Drafter, DrafterParts
from mtp_runtime.models.model import Model
from mtp_runtime.request import Request
from mtp_runtime.sampling import SamplingParams, one_hot, probabilities_of
from runtime.harness import Walk, prompts_of, run
from runtime.table_model import (
    PROMPT,
    Branches,
    Table,
    build_of,
    distance,
    engine_of,
    output_distribution,
    tables,
    target_distribution,
)

SAMPLINGS = [
    SamplingParams(temperature=1.0, max_tokens=4),
    SamplingParams(temperature=0.6, top_k=2, max_tokens=4),
    SamplingParams(temperature=1.5, top_p=0.8, max_tokens=4),
    SamplingParams(temperature=0.0, max_tokens=4),
    SamplingParams(temperature=1.0, top_p=0.0, max_tokens=4),
]


SHAPED: dict[str, Any] = {"draft_temperature": (0.5, 2.0), "draft_stop_entropy": 0.8}
CERTAIN: dict[str, Any] = {"draft_temperature": (0.0,)}
SCHEDULE: dict[str, Any] = {"k_schedule": ((1, 1), (2, 0))}
# Every combination of the options but those that the engine must see requests for, below.
OPTIONS: list[dict[str, Any]] = [
    {},
    CERTAIN,
    SHAPED,
    SCHEDULE,
    SCHEDULE | SHAPED,
    {"draft_temperature": (0.5, 2.0)},
    {"draft_stop_entropy": 0.8},
    CERTAIN | {"draft_stop_entropy": 0.8},
]
# With mtp; with another drafter the samplings that differ, and every choice of drafts.
OF_MTP = [
    *product(SAMPLINGS, [{}, CERTAIN]),
    *product(SAMPLINGS[1:2], [SHAPED, SCHEDULE]),
]
OF_ANY_DRAFTER = [
    *product(SAMPLINGS[:4], [{}]),
    *product(SAMPLINGS[:1], [CERTAIN]),
    *product(SAMPLINGS[1:2], [SHAPED, SCHEDULE]),
]


@dataclass
class SumRecorder(PassThroughDrafter):
    """Records the sums of the distributions that another drafter reports."""

    sums: list[float]

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Draft]:
        drafts = super().propose(requests, counts)
        for draft in drafts:
            if draft.draft_probs is not None:
                self.sums += draft.draft_probs.sum(axis=-1).tolist()
        return drafts


@pytest.mark.parametrize(
    ("method", "setting"),
    nightly_but(
        [*product(["mtp"], OF_MTP), *product(sorted(DRAFTERS), OF_ANY_DRAFTER)],
        product(sorted(DRAFTERS), product(SAMPLINGS, OPTIONS)),
    ),
)
def test_every_drafter_keeps_the_distribution(
    method: str, setting: tuple[SamplingParams, dict[str, Any]]
) -> None:
    params, options = setting
    target, draft = tables(seed=3)
    reported: list[float] = []

    def build(parts: DrafterParts) -> Drafter:
        return SumRecorder(build_of(method)(parts), reported)

    engine = engine_of(target, draft, build, **({"max_draft_tokens": 2} | options))
    found = output_distribution(engine, params)
    assert reported == pytest.approx([1.0] * len(reported), abs=1e-9)
    assert sum(found.values()) == pytest.approx(1.0, abs=1e-9)
    assert distance(found, target_distribution(target, params)) < 1e-9


class DropsUnlikely:
    """A drafter that drops a drawn token which its own distribution finds unlikely."""

    def __init__(self, inner: Drafter) -> None:
        self._inner = inner
        self.observe, self.forget = inner.observe, inner.forget

    def propose(self, requests: Any, counts: Any) -> list[Draft]:
        return [self._kept(draft) for draft in self._inner.propose(requests, counts)]

    def _kept(self, draft: Draft) -> Draft:
        if draft.draft_probs is None or draft.draft_probs[0, draft.tokens[0]] > 0.5:
            return draft
        return Draft()


def test_dropping_a_draft_for_what_it_is_is_seen() -> None:
    """p (.5, .5), q (.9, .1), the unlikely draft dropped: the output's law is (.55, .45)."""
    even, skewed = (Table(torch.tensor([law, law]).log()) for law in ([0.5, 0.5], [0.9, 0.1]))
    target = Table(even.table, skewed.table)
    build = DRAFTERS["mtp"].build
    engine = engine_of(target, skewed, lambda parts: DropsUnlikely(build(parts)))
    params = SamplingParams(temperature=1.0, max_tokens=3)
    found = output_distribution(engine, params)
    # The first token comes of the prompt alone, the second of a draft or without one; the last of
    # all is never drafted.
    second = sum(p for output, p in found.items() if output[1] == 0)
    assert second == pytest.approx(0.55)


@pytest.mark.parametrize(
    ("method", "options"),
    nightly_but(
        [("mtp", {}), ("mtp", SHAPED)],
        product([name for name in sorted(DRAFTERS) if name != "none"], [{}, CERTAIN, SHAPED]),
    ),
)
def test_adaptive_drafting_keeps_the_distribution(
    method: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each output with an engine of its own, since lengths follow from what it has seen, and after
    a request that shows it what lengths cost; a clock of its own makes them the same for the same
    past, and steps of different length."""
    target, draft = tables(seed=3)
    params = SAMPLINGS[1]
    found: Counter[tuple[int, ...]] = Counter()
    lengths = set()
    choices: Branches | None = Branches([])
    while choices is not None:
        ticks = itertools.accumulate(iter(random.Random(2).random, None))
        monkeypatch.setattr(time, "perf_counter", ticks.__next__)
        engine = engine_of(
            target, draft, build_of(method), max_draft_tokens=2, adaptive=True, **options
        )
        for _ in engine.run([Request(0, PROMPT, replace(params, max_tokens=24, seed=0))]):
            pass
        request = Request(1, PROMPT, params)
        request.choices = cast(Any, choices)
        for _ in engine.run([request]):
            pass
        found[tuple(request.output)] += choices.probability  # type: ignore[assignment]
        lengths.add(tuple(request.metrics.drafted))
        choices = choices.following()
    if method == "mtp" and options != CERTAIN:
        assert len(lengths) > 1
    assert distance(dict(found), target_distribution(target, params)) < 1e-9


@pytest.mark.parametrize("method", nightly_but(["mtp"], sorted(DRAFTERS)))
def test_a_schedule_keeps_the_distribution_of_requests_together(method: str) -> None:
    """Of two requests one may end first, so that each number of the schedule counts for a while;
    their outputs are independent of each other, and each has the target's distribution."""
    target, draft = tables(seed=3)
    options = {"k_schedule": ((1, 0), (2, 1)), "draft_temperature": (0.5, 2.0)}
    engine = engine_of(target, draft, build_of(method), **options)
    each = [SamplingParams(temperature=0.6, top_k=2, max_tokens=tokens) for tokens in (3, 4)]
    alone = [target_distribution(target, params) for params in each]
    expected = {
        (*one, *other): probability * alone[1][other]
        for one, probability in alone[0].items()
        for other in alone[1]
    }
    found: Counter[tuple[int, ...]] = Counter()
    courses = set()
    choices: Branches | None = Branches([])
    while choices is not None:
        requests = [Request(number, PROMPT, params) for number, params in enumerate(each)]
        for request in requests:
            request.choices = cast(Any, choices)
        for _ in engine.run(requests):
            pass
        outputs = tuple(token for request in requests for token in request.output)
        found[outputs] += choices.probability  # type: ignore[assignment]
        courses.add((*requests[1].metrics.drafted, requests[1].metrics.target_steps))
        choices = choices.following()
    if method == "mtp":
        assert (1, 4) in courses, "a draft beside the other request, and none alone"
    assert distance(dict(found), expected) < 1e-9


@pytest.mark.parametrize("k", [1, 3])
def test_other_depths_keep_the_distribution(k: int) -> None:
    target, draft = tables(seed=4)
    engine = engine_of(target, draft, DRAFTERS["mtp"].build, max_draft_tokens=k)
    params = SamplingParams(temperature=1.0, max_tokens=4)
    assert distance(output_distribution(engine, params), target_distribution(target, params)) < 1e-9


class KeepsOneProbability:
    """A drafter that keeps the drawn token's probability alone of each distribution, as a published
    engine did. Claiming certainty instead would be sound, only slower."""

    def __init__(self, inner: Drafter) -> None:
        self._inner = inner
        self.observe, self.forget = inner.observe, inner.forget

    def propose(self, requests: Any, counts: Any) -> list[Draft]:
        return [self._reduced(draft) for draft in self._inner.propose(requests, counts)]

    def _reduced(self, draft: Draft) -> Draft:
        if draft.draft_probs is None:
            return draft
        kept = one_hot(np.array(draft.tokens), draft.draft_probs.shape[-1])
        return Draft(draft.tokens, kept * draft.draft_probs)


def test_a_wrong_proposal_distribution_is_seen() -> None:
    target, draft = tables(seed=3)
    build = DRAFTERS["mtp"].build
    engine = engine_of(
        target, draft, lambda parts: KeepsOneProbability(build(parts)), max_draft_tokens=2
    )
    params = SamplingParams(temperature=1.0, max_tokens=4)
    assert distance(output_distribution(engine, params), target_distribution(target, params)) > 0.01


@pytest.mark.parametrize("acceptance", ["topp_window", "relaxed"])
def test_lossy_rules_are_lossy(acceptance: str) -> None:
    target, draft = tables(seed=3)
    engine = engine_of(
        target, draft, DRAFTERS["mtp"].build, max_draft_tokens=2, acceptance=acceptance
    )
    params = SamplingParams(temperature=1.0, top_p=0.8, max_tokens=3)
    found = output_distribution(engine, params)
    assert sum(found.values()) == pytest.approx(1.0, abs=1e-9)
    assert distance(found, target_distribution(target, params)) > 0.01


@pytest.mark.nightly
def test_chi_square_on_the_trained_model(trained_model: Model) -> None:
    """Two tokens after a prompt, 4 x 4 outcomes, 384 draws: alpha = 1e-4, fixed seeds."""
    (prompt,) = prompts_of([3], 2048, seed=5)
    params = SamplingParams(temperature=1.5, top_k=4, max_tokens=3, ignore_eos=True)
    expected = pair_distribution(trained_model, prompt, params)
    draws, seen, accepted, drafted = 384, Counter[tuple[int, ...]](), 0, 0
    for first in range(0, draws, 128):
        each = [replace(params, seed=seed) for seed in range(first, first + 128)]
        result = run(trained_model, [prompt] * 128, each, method="mtp", k=1)
        seen.update(tuple(output[:2]) for output in result.outputs)
        accepted += result.counts("accepted", 0)
        drafted += result.counts("drafted", 0)
    assert 0 < accepted < drafted, "both verdicts must occur"
    assert not seen.keys() - expected.keys()
    rare = {pair for pair, p in expected.items() if p * draws < 5}
    cells = [(seen[pair], p * draws) for pair, p in expected.items() if pair not in rare]
    if rare:
        cells.append((sum(seen[p] for p in rare), draws * sum(expected[p] for p in rare)))
    statistic = sum((count - wanted) ** 2 / wanted for count, wanted in cells)
    assert statistic < critical_chi_square(len(cells) - 1, alpha=1e-4)


def pair_distribution(
    model: Model, prompt: tuple[int, ...], params: SamplingParams
) -> dict[tuple[int, ...], float]:
    probabilities = {}
    first_probs = probabilities_of(Walk(model).feed(prompt)[0][-1].numpy(), params)
    for first in first_probs.nonzero()[0].tolist():
        second_probs = probabilities_of(Walk(model).feed((*prompt, first))[0][-1].numpy(), params)
        for second in second_probs.nonzero()[0].tolist():
            probabilities[first, second] = float(first_probs[first] * second_probs[second])
    return probabilities
