"""Log-probabilities, min_tokens and seeds of requests, held to the model's own logits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mtp_checkpoints.errors import UsageError
from mtp_runtime import LLM, SamplingParams
from mtp_runtime.models.model import Model
from mtp_runtime.request import Request
from runtime.harness import Walk, load, prompts_of, run

PARAMS = SamplingParams(max_tokens=10, ignore_eos=True, logprobs=3)


@pytest.fixture(scope="module")
def model(small: Path) -> Model:
    return load(small)


@pytest.mark.parametrize("temperature", [0.0, 2.0])
@pytest.mark.parametrize(("method", "k"), [("none", 1), ("mtp", 3)])
def test_they_are_those_of_the_raw_logits(
    model: Model, method: str, k: int, temperature: float
) -> None:
    params = replace(PARAMS, temperature=temperature, top_k=2, seed=1, prompt_logprobs=2)
    prompts = prompts_of([9, 300], 96)
    for request in run(model, prompts, params, method=method, k=k, prefill_chunk=64).requests:
        rows = Walk(model).feed(request.tokens)[0].log_softmax(dim=-1)
        noted = [*request.prompt_logprobs, *request.logprobs]
        assert [one.token for one in noted] == request.tokens[1:]
        for row, one in zip(rows, noted, strict=False):
            assert one.logprob == pytest.approx(float(row[one.token]), abs=1e-6)
            best = row.topk(len(one.top))
            assert [token for token, _ in one.top] == best.indices.tolist()
            assert [logprob for _, logprob in one.top] == pytest.approx(best.values.tolist())
        assert {len(one.top) for one in request.logprobs} == {3}
        assert {len(one.top) for one in request.prompt_logprobs} == {2}
        events = list(request.take_events())
        assert events == [] or [event.logprobs for event in events] == request.logprobs


def test_logprobs_survive_preemption_and_change_no_token(model: Model) -> None:
    prompts = prompts_of([30, 30], 96)
    params = replace(PARAMS, max_tokens=40, prompt_logprobs=0)
    found = run(model, prompts, params, cache_tokens=112)
    assert sum(request.metrics.preemptions for request in found.requests) > 0
    plain = run(model, prompts, SamplingParams(max_tokens=40, ignore_eos=True))
    assert found.outputs == plain.outputs
    for request in found.requests:
        assert [one.token for one in request.logprobs] == request.output
        assert [one.token for one in request.prompt_logprobs] == list(request.prompt[1:])
    assert all(request.logprobs == [] for request in plain.requests)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("least", [1, 4, 9])
def test_no_end_token_before_min_tokens(model: Model, least: int, temperature: float) -> None:
    """Half of the vocabulary ends a request: none of it comes early, one soon after."""
    prompts = prompts_of([9, 20, 30], 96)
    ends = tuple(range(48))
    params = SamplingParams(
        max_tokens=60, min_tokens=least, seed=2, temperature=temperature, stop_token_ids=ends[:24]
    )
    for method in ("none", "mtp"):
        for request in run(model, prompts, params, method=method, k=3, eos=ends[24:]).requests:
            assert not set(request.output[:least]) & set(ends)
            assert len(request.output) > least and request.output[-1] in ends
            assert request.finish_reason == "stop"
            own = request.output[-1] if request.output[-1] < 24 else None
            assert request.stop_reason == own


def test_stop_texts_wait_for_min_tokens() -> None:
    def decode(tokens: object) -> str:
        return "".join(chr(97 + token) for token in tokens)  # type: ignore[attr-defined]

    for least, text in ((0, "ab"), (2, "ab"), (3, "ab"), (4, "abcab"), (6, "abcab")):
        params = SamplingParams(max_tokens=9, stop="c", min_tokens=least)
        request = Request(0, (1,), params, decode=decode)
        for token in (0, 1, 2, 0, 1, 2):
            request.commit([token], 0)
            if request.finish_reason:
                break
        assert request.text == text and request.stop_reason == "c"


def test_a_request_without_a_seed_gets_one_that_repeats_it(trained: Path) -> None:
    llm = LLM(trained)
    params = SamplingParams(temperature=1.5, max_tokens=12, ignore_eos=True)
    first, second = llm.generate(["Once upon a time"] * 2, params)
    assert first.seed != second.seed
    (again,) = llm.generate("Once upon a time", replace(params, seed=first.seed))
    assert again.token_ids == first.token_ids


@pytest.mark.parametrize(
    "option", [{"logprobs": 21}, {"logprobs": -1}, {"prompt_logprobs": 21}, {"min_tokens": 65}]
)
def test_limits(option: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="out of range"):
        SamplingParams(**option)  # type: ignore[arg-type]


def test_token_logprobs_of_ties_name_the_lower_ids() -> None:
    from mtp_runtime.logprobs import token_logprobs

    (one,) = token_logprobs(torch.zeros(1, 4), [3], 2)
    assert [token for token, _ in one.top] == [0, 1]
