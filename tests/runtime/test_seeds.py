"""A seed gives the same tokens whatever else is computed beside its request, drafts included."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mtp_runtime import LLM, RequestOutput, SamplingParams
from mtp_runtime.models.load import Loaded, LoadOptions, load_model
from runtime.drafts import ffn_layout, write_eagle3, write_heads
from runtime.harness import prompts_of

PROMPTS = prompts_of([9, 33, 17, 64, 5], 96, seed=4)
PARAMS = [SamplingParams(max_tokens=24, temperature=1.5, seed=s, ignore_eos=True) for s in range(5)]
METHODS = ("mtp", "eagle3", "parallel_heads", "draft_model")
Tokens = list[tuple[int, ...]]

# Options under which other tokens are computed beside each other, or a second time.
WAYS: dict[str, dict[str, Any]] = {
    "a small cache": {"page_size": 4, "cache_tokens": 96},
    "chunks": {"prefill_chunk": 8, "max_step_tokens": 9},
    "a small step": {"max_step_tokens": 5},
    "a batch of two": {"max_batch_size": 2},
}
PREFIXES = {"prefix_cache": True, "page_size": 4}


@pytest.fixture(scope="module")
def loaded(small: Path) -> Loaded:
    return load_model(small, LoadOptions())


@pytest.fixture(params=METHODS)
def drafting(
    request: pytest.FixtureRequest, small: Path, tmp_path: Path, loaded: Loaded
) -> dict[str, Any]:
    """Options of LLM for three drafts of a method."""
    method = request.param
    folders = {
        "eagle3": lambda: write_eagle3(tmp_path),
        "parallel_heads": lambda: write_heads(tmp_path, ffn_layout()),
        "draft_model": lambda: small,
    }
    options = {"loaded": loaded, "speculate_method": method, "speculate_max_draft_token_num": 3}
    return options | ({"draft_model": folders[method]()} if method in folders else {})


def tokens_of(outputs: list[RequestOutput]) -> Tokens:
    return [output.token_ids for output in outputs]


def test_batches_caches_and_steps(small: Path, drafting: dict[str, Any]) -> None:
    alone = LLM(small, **drafting)
    expected = tokens_of([alone.generate([p], s)[0] for p, s in zip(PROMPTS, PARAMS, strict=True)])
    assert tokens_of(alone.generate(PROMPTS, PARAMS)) == expected
    preempted = 0
    for way, options in WAYS.items():
        outputs = LLM(small, **drafting, **options).generate(PROMPTS, PARAMS)
        assert tokens_of(outputs) == expected, way
        preempted += sum(output.metrics.preemptions for output in outputs)
    assert preempted
    if drafting["speculate_method"] != "draft_model":
        for cache in ({}, {"cache_tokens": 96}):
            llm = LLM(small, **drafting, **PREFIXES, **cache)
            for _ in range(2):
                assert tokens_of(llm.generate(PROMPTS, PARAMS)) == expected


def test_a_schedule_of_drafts_does_not_count(small: Path, loaded: Loaded) -> None:
    """A request that names its seed drafts as a batch of one does."""
    options: dict[str, Any] = {"loaded": loaded, "speculate_method": "mtp"}
    llm = LLM(small, k_schedule=[(1, 3), (2, 1), (4, 0)], **options)
    expected = tokens_of([llm.generate([p], s)[0] for p, s in zip(PROMPTS, PARAMS, strict=True)])
    outputs = llm.generate(PROMPTS, PARAMS)
    assert tokens_of(outputs) == expected
    assert all(len(output.metrics.drafted) == 3 for output in outputs)
    free = [SamplingParams(max_tokens=24, temperature=1.5, ignore_eos=True)] * len(PROMPTS)
    assert sum(len(output.metrics.drafted) == 3 for output in llm.generate(PROMPTS, free)) <= 1


def test_a_step_that_failed_decides_as_before(
    small: Path, loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its drafts were drawn; they are drawn again from the same random numbers."""
    llm = LLM(small, loaded=loaded, speculate_method="mtp", speculate_max_draft_token_num=3)
    expected = tokens_of(llm.generate(PROMPTS, PARAMS))
    engine, requests = llm.engine, llm.requests(PROMPTS, PARAMS)
    for request in requests:
        engine.add(request)
    forward, steps = engine._forward, 0
    while engine.has_work:
        steps += 1
        with monkeypatch.context() as patch:
            if steps in (3, 4, 7):
                patch.setattr(engine, "_forward", lambda groups: forward(None))
                with pytest.raises(TypeError):
                    engine.step()
                continue
            engine.step()
    assert [tuple(request.output) for request in requests] == expected


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_weights_in_bfloat16_are_as_deterministic(small: Path, temperature: float) -> None:
    """Bits of log-probabilities depend on neither batch nor step, those of greedy ones not on
    drafts."""
    params = [replace(own, temperature=temperature, logprobs=2) for own in PARAMS]

    def loaded(method: str, **more: Any) -> LLM:
        drafts = 3 if method == "mtp" else None
        options = {"speculate_method": method, "speculate_max_draft_token_num": drafts, **more}
        return LLM(small, dtype="bfloat16", deterministic=True, **options)

    alone = loaded("mtp")
    expected = [alone.generate([p], own)[0] for p, own in zip(PROMPTS, params, strict=True)]
    plain = [loaded("none")] if temperature == 0 else []
    for llm in (alone, loaded("mtp", **WAYS["chunks"]), *plain):
        found = llm.generate(PROMPTS, params)
        assert tokens_of(found) == tokens_of(expected)
        assert [output.logprobs for output in found] == [output.logprobs for output in expected]
