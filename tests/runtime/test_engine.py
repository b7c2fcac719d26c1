"""Guarantees of the engine around decoding: ends, seeds, admission, refusals, counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mtp_checkpoints.errors import MtpExportError, ResourceError, UnsupportedError, UsageError
from mtp_runtime.acceptance.base import Verdict
from mtp_runtime.config import EngineConfig, SpeculationConfig
from mtp_runtime.draft_length import Step
from mtp_runtime.drafters import DRAFTERS
from mtp_runtime.drafters.base import DrafterParts, Pass
from mtp_runtime.drafters.known_answers import KnownAnswersDrafter
from mtp_runtime.drafters.none import NoDrafter
from mtp_runtime.engine import Engine
from mtp_runtime.judging import Group, Judge
from mtp_runtime.models.model import Model
from mtp_runtime.request import Request
from mtp_runtime.sampling import SamplingParams
from runtime.harness import Run, load, prompts_of, run

PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def model(small: Path) -> Model:
    return load(small)


def with_known_answers(
    model: Model, prompts: list[tuple[int, ...]], params: SamplingParams, **more: int
):  # type: ignore[no-untyped-def]
    answers = dict(zip(prompts, run(model, prompts, PARAMS).outputs, strict=True))
    build = lambda parts: KnownAnswersDrafter(answers, model.config.vocab)  # noqa: E731
    return answers, run(model, prompts, params, build=build, **more)


@pytest.mark.parametrize("place", range(1, 12))
def test_the_end_token_ends_a_block_anywhere(model: Model, place: int) -> None:
    (prompt,) = prompts = prompts_of([9], 96, seed=3)
    answer = run(model, prompts, PARAMS).outputs[0]
    end = answer[place]
    params = replace(PARAMS, ignore_eos=False)
    build = lambda parts: KnownAnswersDrafter({prompt: answer}, 96)  # noqa: E731
    found = run(model, prompts, params, build=build, k=5, eos=(end,))
    assert found.outputs[0] == answer[: answer.index(end) + 1]
    assert found.requests[0].finish_reason == "stop"
    found = run(model, prompts, replace(PARAMS, stop_token_ids=(end,)), build=build, k=5)
    assert found.outputs[0] == answer[: answer.index(end) + 1]


@pytest.mark.parametrize("limit", range(1, 13))
def test_max_tokens_inside_a_block(model: Model, limit: int) -> None:
    prompts = prompts_of([9, 20], 96, seed=3)
    answers, found = with_known_answers(model, prompts, replace(PARAMS, max_tokens=limit), k=5)
    assert found.outputs == [answer[:limit] for answer in answers.values()]
    assert {request.finish_reason for request in found.requests} == {"length"}


def test_counts_have_their_denominators(model: Model) -> None:
    _, found = with_known_answers(model, prompts_of([9], 96), PARAMS, k=3)
    metrics = found.requests[0].metrics
    # One token by the prompt; blocks of 4, 4; then three tokens are left, so two drafts.
    assert metrics.target_steps == 4
    assert metrics.drafted == metrics.reached == metrics.accepted == [3, 3, 2]
    assert metrics.output_tokens == 12
    assert 0 < metrics.first_token_seconds <= metrics.finished_seconds


def test_adaptive_lengths_follow_from_the_steps_before(model: Model) -> None:
    """Steps that are not shown to the rule leave it at the first length that it measures."""
    params = replace(PARAMS, max_tokens=24)
    (request,) = run(
        model, prompts_of([9], 96), params, method="mtp", k=5, lengths={"adaptive": True}
    ).requests
    counts = request.metrics
    # The prompt's step has no drafts, and the last one may have none for lack of tokens to write.
    assert 0 < counts.drafted[0] < counts.target_steps - 2


def seeded(model: Model, prompts: list[tuple[int, ...]], seeds: list[int]) -> Run:
    params = [SamplingParams(1.0, 0.9, 20, 8, seed, ignore_eos=True) for seed in seeds]
    return run(model, prompts, params, method="mtp", k=2)


def test_a_seed_gives_the_same_tokens_in_any_batch(model: Model) -> None:
    prompts = prompts_of([5, 9, 5], 96)
    together = seeded(model, prompts, [1, 2, 3]).outputs
    alone = [seeded(model, [p], [s]).outputs[0] for p, s in zip(prompts, [1, 2, 3], strict=True)]
    assert together == alone
    assert seeded(model, prompts, [4, 5, 6]).outputs != together


def test_top_p_zero_is_greedy(model: Model) -> None:
    prompts = prompts_of([5, 9], 96)
    sampled = SamplingParams(temperature=1.0, top_p=0.0, max_tokens=12, ignore_eos=True)
    found = run(model, prompts, sampled, method="mtp", k=3)
    assert found.outputs == run(model, prompts, PARAMS).outputs


def test_requests_that_can_never_run_are_refused(model: Model) -> None:
    engine = Engine(model, EngineConfig(page_size=16, cache_tokens=64), DRAFTERS["none"].build)
    for prompt, limit, error in (
        ((), 4, UsageError),
        ((96,), 4, UsageError),
        ((-1,), 4, UsageError),
        ((1,) * 500, 40, UsageError),
        ((1,) * 60, 10, ResourceError),
    ):
        with pytest.raises(error):
            engine.add(Request(0, prompt, SamplingParams(max_tokens=limit)))
    assert not engine.has_work


def engine_of(model: Model, **settings: int) -> Engine:
    config = EngineConfig(**{"page_size": 16, "cache_tokens": 512} | settings, poison_freed=True)
    return Engine(model, config, DRAFTERS["none"].build)


def requests_of(prompts: list[tuple[int, ...]]) -> list[Request]:
    return [Request(number, prompt, PARAMS) for number, prompt in enumerate(prompts)]


def test_runs_that_take_turns_share_their_steps(model: Model) -> None:
    prompts = prompts_of([9, 20], 96, seed=3)
    engine, (one, other) = engine_of(model), requests_of(prompts)
    first, second = engine.run([one]), engine.run([other])
    events = [next(first)]
    assert len(list(second)) == PARAMS.max_tokens
    assert one.finish_reason == "length", "it was stepped along"
    events += first
    assert [event.token for event in events] == one.output
    assert [one.output, other.output] == run(model, prompts, PARAMS).outputs
    assert engine.pages.free_pages == engine.pages.pages


def test_an_abort_ends_a_run_and_no_other(model: Model) -> None:
    prompts = prompts_of([9, 20], 96, seed=3)
    engine, (one, other) = engine_of(model), requests_of(prompts)
    first, second = engine.run([one]), engine.run([other])
    next(first), next(second)
    engine.abort([other])
    assert list(second) == [] and other.finish_reason == "abort"
    assert len(list(first)) == PARAMS.max_tokens - 1
    engine.abort([one])
    assert one.finish_reason == "length", "what has ended stays as it is"
    assert engine.pages.free_pages == engine.pages.pages


def test_an_abort_leaves_nothing_with_the_drafter(model: Model) -> None:
    """Between two steps: the pages are free and the drafter's state is gone before the next one."""
    forgotten: list[Request] = []

    class Remembers(NoDrafter):
        def forget(self, request: Request) -> None:
            forgotten.append(request)

    config = EngineConfig(page_size=16, cache_tokens=512, poison_freed=True)
    engine, (one, other) = Engine(model, config, Remembers), requests_of(prompts_of([9, 20], 96))
    engine.add(one)
    engine.add(other)
    engine.step()
    engine.abort([other])
    assert forgotten == [other]
    assert engine.pages.free_pages == engine.pages.pages - len(one.cached.pages)
    assert engine.running == 1


def test_an_aborted_request_leaves_the_queue(model: Model) -> None:
    engine = engine_of(model, max_batch_size=1)
    one, other = requests_of(prompts_of([9, 20], 96))
    engine.add(one)
    engine.add(other)
    engine.step()
    engine.abort([other])
    while engine.has_work:
        engine.step()
    assert [event.token for event in one.take_events()] == one.output
    assert other.output == [] and other.finish_reason == "abort"


class FailsOnce(NoDrafter):
    """Raises in its third step."""

    def __init__(self, parts: DrafterParts) -> None:
        self._steps = 0

    def observe(self, passes: Sequence[Pass]) -> None:
        self._steps += 1
        if self._steps == 3:
            raise RuntimeError("planted")


def test_a_failed_step_ends_the_run_that_made_it_alone(model: Model) -> None:
    """The other's tokens are those that it gets alone, though its cache was half written."""
    prompts = prompts_of([9, 20], 96, seed=3)
    config = EngineConfig(page_size=16, cache_tokens=512, poison_freed=True)
    engine, (one, other) = Engine(model, config, FailsOnce), requests_of(prompts)
    first, second = engine.run([one]), engine.run([other])
    next(first), next(second)
    with pytest.raises(RuntimeError, match="planted"):
        list(first)
    assert one.finish_reason == "abort"
    list(second)
    assert other.output == run(model, prompts[1:], PARAMS).outputs[0]
    assert engine.pages.free_pages == engine.pages.pages


class Halting:
    """Text of tokens that raises an error once, after some tokens."""

    def __init__(self, error: BaseException, tokens: int) -> None:
        self._error, self._left = error, tokens

    def __call__(self, ids: Sequence[int]) -> str:
        self._left -= 1
        if self._left == 0:
            raise self._error
        return "x" * len(ids)


def test_an_error_of_one_request_ends_that_alone(model: Model) -> None:
    """In the run that made it; those of others go on, with their own tokens."""
    prompts = prompts_of([9, 20, 5], 96, seed=3)
    engine, requests = engine_of(model), requests_of(prompts)
    requests[1] = Request(1, prompts[1], PARAMS, decode=Halting(ValueError("planted"), 4))
    first, second = engine.run([requests[0], requests[2]]), engine.run([requests[1]])
    next(first)
    with pytest.raises(ValueError, match="planted"):
        list(second)
    list(first)
    expected = run(model, prompts, PARAMS).outputs
    assert [requests[0].output, requests[2].output] == [expected[0], expected[2]]
    assert [r.finish_reason for r in requests] == ["length", "error", "length"]
    assert all(request.metrics.preemptions == 0 for request in requests)
    assert engine.pages.free_pages == engine.pages.pages and not engine.has_work


def test_a_verdict_that_fails_ends_its_request_alone(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = prompts_of([9, 20], 96, seed=3)
    expected = run(model, prompts, PARAMS).outputs
    engine, (one, other) = engine_of(model), requests_of(prompts)
    decide = Judge.decide

    def failing(judge: Judge, group: Group, *arguments: Any) -> Verdict:
        if group.request is other:
            raise ArithmeticError("planted")
        return decide(judge, group, *arguments)

    monkeypatch.setattr(Judge, "decide", failing)
    first, second = engine.run([one]), engine.run([other])
    next(first)
    with pytest.raises(ArithmeticError, match="planted"):
        list(second)
    list(first)
    assert (one.output, other.output) == (expected[0], [])
    assert engine.pages.free_pages == engine.pages.pages and not engine.has_work


def test_a_failed_step_leaves_ended_requests_ended(model: Model) -> None:
    """One ends in the step in which Ctrl-C comes while the next one is committed."""
    prompts = prompts_of([9, 20], 96, seed=3)
    ending = Request(0, prompts[0], replace(PARAMS, max_tokens=2))
    other = Request(1, prompts[1], PARAMS, decode=Halting(KeyboardInterrupt(), 3))
    engine = engine_of(model)
    engine.add(ending)
    engine.add(other)
    with pytest.raises(KeyboardInterrupt):
        while engine.has_work:
            engine.step()
    assert ending.finish_reason == "length" and engine.waiting == 1
    while engine.has_work:
        engine.step()
    assert len(ending.output) == 2 and ending.finish_reason == "length"
    assert engine.pages.free_pages == engine.pages.pages


@pytest.mark.parametrize("most", [1, 2, 5, 7])
def test_drafts_count_in_the_tokens_of_a_step(
    model: Model, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, rows = prompts_of([9, 20, 5], 96, seed=3), list[int]()
    forward = Engine._forward

    def counted(engine: Engine, groups: Sequence[Group]) -> Any:
        rows.append(sum(group.rows for group in groups))
        return forward(engine, groups)

    monkeypatch.setattr(Engine, "_forward", counted)
    expected = run(model, prompts, PARAMS).outputs
    rows.clear()
    found = run(model, prompts, PARAMS, method="mtp", k=3, max_step_tokens=most)
    assert found.outputs == expected
    assert max(rows) <= most


def test_requests_wait_for_free_pages(model: Model) -> None:
    prompts = prompts_of([30, 30, 30, 30], 96)
    expected = run(model, prompts, PARAMS)
    tight = run(model, prompts, PARAMS, cache_tokens=48)  # room for one at a time
    assert tight.outputs == expected.outputs
    assert [r.metrics.preemptions for r in tight.requests] == [0, 0, 0, 0]


@pytest.mark.parametrize(
    "options",
    [
        {"max_draft_tokens": 0},
        {"max_draft_tokens": 6},
        {"max_ngram_size": 0},
        {"verify_window": 0},
        {"draft_temperature": (0.5, -0.1)},
        {"draft_stop_entropy": -1.0},
        {"method": "mtp", "k_schedule": ((1, 6),)},
        {"method": "mtp", "k_schedule": ((0, 1),)},
    ],
)
def test_speculation_limits(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="out of range"):
        SpeculationConfig(**options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"k_schedule": ((2, 1),)}, "every batch size"),
        ({"k_schedule": ((1, 1), (1, 2))}, "every batch size"),
        ({"k_schedule": ((1, 1), (8, 2), (4, 3))}, "every batch size"),
        ({"k_schedule": ((1, 1),), "adaptive": True}, "one of the options"),
        ({"adaptive": True, "method": "none"}, "how many drafts"),
        ({"k_schedule": ((1, 1),), "method": "none"}, "how many drafts"),
    ],
)
def test_draft_lengths_that_cannot_be(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        SpeculationConfig(**({"method": "mtp"} | options))


def test_drafters_refuse_models_they_cannot_use(small: Path, model: Model) -> None:
    bare = replace(model, mtp_modules=())
    settings = EngineConfig(cache_tokens=64, page_size=16)
    for method, target in (("mtp", bare), ("draft_model", model)):
        with pytest.raises(UnsupportedError):
            Engine(target, settings, DRAFTERS[method].build)
    other = replace(model, config=replace(model.config, vocab=97))
    with pytest.raises(MtpExportError, match="another vocabulary"):
        Engine(model, settings, DRAFTERS["draft_model"].build, other)


class Lengths:
    """Three drafts at every step, and what is learnt from each."""

    def __init__(self) -> None:
        self.observed: list[Step] = []

    def choose(self, batch: int) -> int:
        return 3

    def observe(self, step: Step) -> None:
        self.observed.append(step)


def test_a_request_without_drafts_decodes_plainly_beside_others(model: Model) -> None:
    """The drafter sees nothing of it, and no adaptive length is learnt from its steps."""
    prompts = prompts_of([9, 20], 96, seed=3)
    answers = dict(zip(prompts, run(model, prompts, PARAMS).outputs, strict=True))
    shown: list[Request] = []

    class Watched(KnownAnswersDrafter):
        def observe(self, passes: Sequence[Pass]) -> None:
            shown.extend(p.request for p in passes)

    config = EngineConfig(speculation=SpeculationConfig(max_draft_tokens=3))
    engine = Engine(model, config, lambda parts: Watched(answers, model.config.vocab))
    engine._length = length = Lengths()
    plain, drafted = (
        Request(number, prompt, replace(PARAMS, use_drafts=bool(number)))
        for number, prompt in enumerate(prompts)
    )
    list(engine.run([plain, drafted]))
    assert [plain.output, drafted.output] == list(map(list, answers.values()))
    assert (plain.metrics.drafted, plain.metrics.target_steps) == ([], 12)
    assert drafted.metrics.target_steps < 12 and set(map(id, shown)) == {id(drafted)}
    assert length.observed == []
